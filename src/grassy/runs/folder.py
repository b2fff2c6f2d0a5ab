"""The folder of a run: its lock, the state to resume from, and the order in which files are saved."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from grassy.atomic import copy_atomically, remove_torn_files
from grassy.distributed.saves import MANIFEST, PART, newest
from grassy.recipes.files import of_this_version
from grassy.recipes.recipe import Recipe
from grassy.runs.state import STATE, state_in, write_torch
from grassy.runs.weights import BEST, BEST_SAVES, LAST, Description, save_weights

#: Exists until a run has saved its first state. It marks weights without a state as those of a killed run.
FIRST = ".first-checkpoint"
#: Fields that may change when a run is resumed: they affect its length or convenience, not what it trains.
FREE = (
    "description",
    "paper",
    "epochs",
    "decay_milestones",  # they follow the epochs
    "warmup_epochs",  # follows the epochs, if there are few
    "workers",
    "val_batch_size",
    "val_interval",
    "checkpoint_interval",
    "nonfinite",
    "shard_head",
    "fsdp",
)


class RunFolder:
    """The folder of a run, locked: only one process at a time may write to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def claim(self) -> None:
        """Create and lock the folder, and remove the temporary files of killed processes."""
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ImportError):  # not on Windows
            import fcntl

            self._lock = os.open(self.path, os.O_RDONLY)
            # A worker that outlives its killed process by some seconds must not block the next process.
            os.register_at_fork(after_in_child=self.release)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._lock)
                self._lock = None
                raise ValueError(f"another process is writing to {self.path}") from None
        remove_torn_files(self.path)

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def find_state(self, resume: str) -> Path | None:
        """The file or save to resume from; None for a new run. It refuses a folder that holds another run."""
        own = state_in(self.path)
        taken = own is not None or any((self.path / name).exists() for name in (LAST, BEST, BEST_SAVES))
        killed = (self.path / FIRST).exists() and own is None
        if resume == "auto":
            if taken and own is None and not killed:
                raise ValueError(
                    f"{self.path} holds weights, but no {STATE} to go on from: move them away, or give another --output"
                )
            return own
        source = Path(resume)
        if resume and source.suffix == ".safetensors":
            raise ValueError(f"{source} holds weights alone: to resume, give the run's folder or its {STATE}")
        if source.is_dir() and not (source / MANIFEST).is_file():
            source = state_in(source) or source / STATE
        if resume and not source.exists():
            raise ValueError(f"there is nothing to resume from at {source}")
        if taken and not (resume and (killed or (own is not None and source.resolve() == own.resolve()))):
            raise ValueError(f"{self.path} holds a run already: --resume auto resumes it, or give another --output")
        return source if resume else None

    def adopt_best(self, state: Path) -> None:
        """Copy the best weights of the resumed run, if it is in another folder."""
        if state.is_dir():
            best = newest(state.parent.parent / BEST_SAVES)
            if best is not None and newest(self.path / BEST_SAVES) is None:
                (self.path / FIRST).touch()
                part = self.path / BEST_SAVES / f"{best.name}{PART}"
                shutil.copytree(best, part, dirs_exist_ok=True)
                part.rename(part.with_name(best.name))
            return
        best = state.parent / BEST
        if best.is_file() and not (self.path / BEST).exists():
            (self.path / FIRST).touch()
            copy_atomically(best, self.path / BEST)

    @contextlib.contextmanager
    def first_save(self) -> Iterator[None]:
        """Mark the folder while the first files are written: until a state exists, they are those of a killed run."""
        if state_in(self.path) is None:
            (self.path / FIRST).touch()
        yield
        if state_in(self.path) is not None:
            (self.path / FIRST).unlink(missing_ok=True)

    def save(
        self,
        best: tuple[Mapping[str, Tensor], Description] | None,
        last: tuple[Mapping[str, Tensor], Description],
        state: Mapping[str, Any],
    ) -> None:
        """Write the best and the last weights, then the state, which must never refer to missing files."""
        with self.first_save():
            if best is not None:
                save_weights(*best, self.path / BEST)
            save_weights(*last, self.path / LAST)
            write_torch(state, self.path / STATE)


def check_same_run(
    saved: Mapping[str, Any],
    recipe: Recipe,
    updates: int,
    images: int | None,
    class_names: Sequence[str] | None,
    path: Path,
) -> None:
    """Raise a ValueError if a saved state belongs to another recipe, another number of images or other classes."""
    old, new = of_this_version(saved.get("recipe", {})), {**recipe.to_dict(), "direction": "gradient"}
    for name in new:
        if name not in FREE and name in old and old[name] != new[name]:
            raise ValueError(
                f"{path} belongs to a run with {name}={old[name]}, not {new[name]}: a changed recipe is a new run, in "
                "another --output (with --initial-checkpoint to start from these weights)"
            )
    if saved.get("updates", updates) != updates:
        raise ValueError(
            f"{path} belongs to a run with {saved['updates']} updates per epoch, not {updates}: is this other data?"
        )
    if images is not None and saved.get("images") not in (None, images):
        raise ValueError(f"{path} belongs to a run with {saved['images']} images, not {images}: is this other data?")
    before = saved.get("class_names")
    if before is not None and class_names is not None and before != list(class_names):
        lost = next((name for name in before if name not in class_names), None)
        what = "the same classes in another order" if lost is None else f"a class {lost!r}, which is not here"
        raise ValueError(f"{path} belongs to a run with {what}: is this other data?")
