"""The checkpoints of a run: their contents, when they are written, and how a run resumes from one."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grassy._version import __version__
from grassy.data.stream_loader import StreamLoader
from grassy.distributed import processes
from grassy.distributed.saves import read_plain
from grassy.distributed.state import load_state, save_state
from grassy.inference.evaluate import Metrics
from grassy.inference.outliers import RATE
from grassy.recipes.changes import with_changes
from grassy.runs.folder import RunFolder, check_same_run
from grassy.runs.state import SAVES, read_torch
from grassy.runs.weights import BEST_SAVES, PREPARATION, Description, description_text
from grassy.train.run import Run
from grassy.train.sharding import has_sharded_weights, saves_shards
from grassy.train.trouble import is_of_another_process, stop_if_not_finite

#: Columns that a description stores outside its metrics.
APART = ("epoch", "outlier_threshold")


def run_of_state(state: Path) -> Path:
    """The run folder of a state, which is a file in it or a save two levels below."""
    return state.parent.parent if state.is_dir() else state.parent


@contextlib.contextmanager
def _fitting(path: Path) -> Iterator[None]:
    """Raise a ValueError for a state that does not fit what is built; an error of another process stays what it is."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        if is_of_another_process(error) or " is damaged: " in str(error):
            raise
        raise ValueError(f"{path} does not belong to this recipe: {' '.join(str(error).split())[:200]}") from None


@dataclass
class Checkpoints:
    """Saves a run to its folder, and restores it."""

    run: Run
    folder: RunFolder
    restored_from: Path | None = None  # a folder
    restored_sharded: bool = False
    best: tuple[dict[str, Tensor], Description] | None = None  # weights not yet written
    saved_at: float = 0.0

    def __post_init__(self) -> None:
        self.saved_at = time.monotonic()

    def is_due(self) -> bool:
        """Whether the recipe's checkpoint interval has passed, by the clock of the main process."""
        return self.run.process.is_main and time.monotonic() - self.saved_at >= self.run.recipe.checkpoint_interval

    @property
    def sharded(self) -> bool:
        """Whether each process saves its own shard of the weights. A run never changes this."""
        if self.restored_from is not None:
            return self.restored_sharded
        return has_sharded_weights(self.run.trained.model) or self._saves_shards

    @functools.cached_property
    def _saves_shards(self) -> bool:
        return saves_shards(self.run.recipe, self.run.data.num_classes)

    def save(self) -> None:
        """Write the last weights, new best weights if there are any, and the state to resume from."""
        stop_if_not_finite(self.run)  # checkpoints hold finite weights only
        if self.sharded:
            self._save_sharded()
            self.saved_at = time.monotonic()
            return
        ranks = processes.gathered([self._own_state()])
        with processes.averaged_buffers(*self.run.trained.copies):
            processes.on_rank_0(lambda: self._write_whole(ranks))  # if it cannot, all say so
        self.saved_at = time.monotonic()

    def _write_whole(self, ranks: list[dict[str, Any]]) -> None:
        last = self.run.trained.evaluated.state_dict(), self.description()
        self.folder.save(self.best, last, self.state_dict(ranks))
        self.best = None

    def keep_if_best(self, metrics: Metrics) -> None:
        """Copy the best weights so far to the CPU, to be written with the next checkpoint."""
        position = self.run.position
        if (metrics.top1, -metrics.loss) > (position.best, -position.best_loss):
            position.best, position.best_loss = metrics.top1, metrics.loss
            if self.sharded:
                with self._first_save():
                    place, plain = self.folder.path / BEST_SAVES, {"description": description_text(self.description())}
                    save_state(place, self.run.trained.evaluated, plain=plain)
            elif self.run.process.is_main:
                weights = self.run.trained.evaluated.state_dict()
                self.best = {name: tensor.cpu().clone() for name, tensor in weights.items()}, self.description()

    def _own_state(self) -> dict[str, Any]:
        """The state that differs between processes: the sum and number of losses, and batch statistics."""
        buffers = [processes.floating_buffers(model) for model in self.run.trained.copies]
        return {
            "losses": self.run.step.losses.cpu(),
            "buffers": [{name: buffer.cpu() for name, buffer in each.items()} for each in buffers],
        }

    def _save_sharded(self) -> None:
        """The same, by all processes. State that differs between them is stored as one row per process."""
        trained, own = self.run.trained, self._own_tensors()
        own = {name: tensor.clone() for name, tensor in own.items()}
        losses = processes.summed(self.run.step.losses.clone()) / self.run.process.world_size
        with processes.averaged_buffers(*trained.copies), self._first_save():
            plain = {
                **self._plain_state(),
                "losses": losses.tolist(),
                "world_size": self.run.process.world_size,
                "description": description_text(self.description()),
            }
            average = trained.average
            save_state(self.folder.path / SAVES, trained.model, trained.optimizer, plain, average=average, own=own)

    def _own_tensors(self) -> dict[str, Tensor]:
        """The tensors that differ between processes, by name: see `_own_state`."""
        models = {f"{number}": model for number, model in enumerate(self.run.trained.copies)}
        buffers = {
            f"{number}.{name}": buffer
            for number, model in models.items()
            for name, buffer in processes.floating_buffers(model).items()
        }
        return {"losses": self.run.step.losses, **buffers}

    def _first_save(self) -> contextlib.AbstractContextManager[None]:
        return self.folder.first_save() if self.run.process.is_main else contextlib.nullcontext()

    def _plain_state(self) -> dict[str, Any]:
        """The part of the state that JSON can hold."""
        run, trained = self.run, self.run.trained
        return {
            "grassy": __version__,
            "recipe": run.recipe.to_dict(),
            "head": trained.head,  # with the value of "auto", which another version may choose differently
            "updates": run.position.updates_per_epoch,
            "images": self._images(),
            "stream": self._readers_of_stream(),
            "class_names": None if run.data.class_names is None else list(run.data.class_names),
            "progress": run.position.to_dict(),
            "scaler": run.step.scaler.state_dict(),
        }

    def state_dict(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """The state to resume from; `ranks` holds the own state of every process."""
        trained = self.run.trained
        state = {
            **self._plain_state(),
            "model": trained.model.state_dict(),
            "average": None if trained.average is None else trained.average.state_dict(),
            "optimizer": trained.optimizer.state_dict(),
            "losses": torch.stack([own["losses"] for own in ranks]).mean(0),
        }
        return state if len(ranks) == 1 else {**state, "ranks": ranks}

    def restore(self, path: Path) -> Run:
        """Restore a saved state; a ValueError, in all processes, if it belongs to another run or cannot be read.

        Returns the run, with the recipe that it continues with.
        """
        sharded = path.is_dir()
        if has_sharded_weights(self.run.trained.model) and not sharded:
            raise ValueError(
                f"{path} is of a run in which every process had all weights: go on with shard_head=false fsdp=false"
            )
        saved = processes.everywhere(lambda: self._read_and_check(path, sharded))
        if sharded:
            self._restore_sharded(path)
        else:
            processes.everywhere(lambda: self._restore_whole(saved, path))
        self.run.step.number.fill_(self.run.position.done)
        self.restored_from, self.restored_sharded = run_of_state(path), sharded
        return self.run

    def _read_and_check(self, path: Path, sharded: bool) -> dict[str, Any]:
        """What a state says, in a sharded one without tensors; a ValueError if it is of another run."""
        saved = read_plain(path) if sharded else read_torch(path)
        if self.run.trained.average is not None and self.run.recipe.model_ema_warmup:
            self.run = self._averaged_as_before(saved.get("recipe", {}))
        run, head = self.run, self.run.trained.head
        self._check_images(saved.get("images"), path)
        updates = run.position.updates_per_epoch
        check_same_run(saved, run.recipe, updates, self._images(), run.data.class_names, path)
        if saved["progress"]["update"] and (before := saved.get("stream")) not in (None, self._readers_of_stream()):
            run.data.notes.append(
                f"the rest of epoch {saved['progress']['epoch'] + 1} repeats some images and leaves out others: the "
                f"order of a stream depends on its readers, {before} before and {self._readers_of_stream()} now"
            )
        if (before := saved.get("head", head)) != head:
            raise ValueError(
                f"{path} belongs to a run with head {before}, and this version of grassy makes {head} of it: "
                f"go on with version {saved.get('grassy')}, or begin another --output with --initial-checkpoint"
            )
        return saved

    def _restore_whole(self, saved: dict[str, Any], path: Path) -> None:
        run, trained = self.run, self.run.trained
        with _fitting(path):
            trained.model.load_state_dict(saved["model"])
            trained.optimizer.load_state_dict(saved["optimizer"])
            if trained.average is not None:
                trained.average.load_state_dict(saved["average"])
            run.step.scaler.load_state_dict(saved["scaler"])
            run.position.restore(saved["progress"])
            run.step.losses.copy_(saved["losses"])
            if len(ranks := saved.get("ranks", [])) == run.process.world_size:
                own = ranks[run.process.rank]
                run.step.losses.copy_(own["losses"])
                for model, buffers in zip(trained.copies, own["buffers"], strict=True):
                    for name, buffer in processes.floating_buffers(model).items():
                        buffer.copy_(buffers[name])

    def _averaged_as_before(self, before: dict[str, Any]) -> Run:
        """The run, without the warm-up of its average if an earlier version started it without one."""
        run = self.run
        if before.get("model_ema_warmup", False):
            return run
        assert run.trained.average is not None
        run.trained.average.use_warmup = False
        run.data.notes.append("goes on with model_ema_warmup=false, as the run began")
        return dataclasses.replace(run, recipe=with_changes(run.recipe, {"model_ema_warmup": False}))

    def _check_images(self, before: int | None, path: Path) -> None:
        """Raise a ValueError for other training images, if a held-out image may be among them."""
        gone, images = self.run.data.gone, self._images()
        if gone and before is not None and before != images:
            raise ValueError(
                f"{path} belongs to a run with {before} training images, and now there are {images}, but {gone[0]}, "
                "which it held out, is gone: give the files their names back, or begin another --output"
            )

    def _restore_sharded(self, path: Path) -> None:
        run, trained, own = self.run, self.run.trained, self._own_tensors()
        with _fitting(path):
            saved = load_state(path, trained.model, trained.optimizer, average=trained.average, own=own)
            if saved["world_size"] != run.process.world_size:
                run.step.losses.copy_(torch.tensor(saved["losses"]))
            run.step.scaler.load_state_dict(saved["scaler"])
            run.position.restore(saved["progress"])

    def description(self) -> Description:
        """The description of the weights, with the metrics of the last row."""
        recipe = self.run.recipe
        row = self.run.position.rows[-1] if self.run.position.rows else {}
        same = ("model", "model_kwargs", *PREPARATION)
        return Description(
            **{name: getattr(recipe, name) for name in same},
            num_classes=self.run.data.num_classes,
            head=self.run.trained.head,
            class_names=self.run.data.class_names,
            img_size=recipe.test_size or recipe.img_size,
            recipe=recipe.to_dict(),
            epoch=row.get("epoch"),
            metrics={key: value for key, value in row.items() if value is not None and key not in APART},
            outlier_threshold=row.get("outlier_threshold"),
            outlier_rate=None if row.get("outlier_threshold") is None else RATE,
            version=__version__,
        )

    def _readers_of_stream(self) -> str | None:
        """What the order of a stream depends on; None for images that are read by their index."""
        loader = self.run.data.train
        if not isinstance(loader, StreamLoader):
            return None
        return f"workers={loader.images.workers} processes={self.run.process.world_size}"

    def _images(self) -> int | None:
        """The number of training images; None for a stream."""
        loader = self.run.data.train
        return None if isinstance(loader, StreamLoader) else loader.batches.length
