"""What all processes of a run must agree on before it starts: the state to resume from, and the images."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grassy.data.class_folders import FolderImages
from grassy.data.images import ArrayImages
from grassy.data.run_data import Data
from grassy.distributed import processes
from grassy.distributed.processes import everywhere
from grassy.runs.folder import RunFolder

#: How many names are compared if a name has to be read from its image.
LOOKED_AT = 100


def state_to_resume(folder: RunFolder, resume: str) -> Path | None:
    """The state to resume from, or None. Processes on machines without a shared disk could find different ones."""
    state = everywhere(lambda: folder.find_state(resume))
    if len(found := dict.fromkeys(processes.gathered([state]))) > 1:
        first, other, *_ = (f"{path}" if path is not None else "none" for path in found)
        raise ValueError(
            f"the processes found different checkpoints, {first} and {other}: "
            "--output must be one folder for all machines"
        )
    return state


def check_same_data(data: Data, data_dir: Path | None) -> None:
    """Raise ValueError in all processes unless all have opened the same images, with the same labels and splits.

    Copies of a set on several machines may differ, and each process draws its images by their index.
    """
    if processes.world_size() == 1:
        return
    facts = processes.gathered([everywhere(lambda: _facts(data, data_dir))])
    for rank, own in enumerate(facts):
        for what, value in own.items():
            if value == (first := facts[0][what]):
                continue
            counted = isinstance(value, int)
            differs = f"{value} {what}, and rank 0 has {first}" if counted else f"different {what} than rank 0"
            where = "" if data_dir is None else f" in {data_dir}"
            raise ValueError(f"rank {rank} of {len(facts)} has {differs}: all processes must see the same data{where}")


def _facts(data: Data, data_dir: Path | None) -> dict[str, int | str]:
    """Numbers, and digests of names and labels, by what they are called in a message."""
    found: dict[str, int | str] = {"classes": _digest(data.class_names or (str(data.num_classes),))}
    for kind, loader in (("training", data.train), ("validation", data.validation)):
        images: Any = getattr(loader, "images", None)
        if hasattr(images, "name"):  # no stream, which has neither names nor labels yet
            found[f"{kind} images"] = len(images)
            # Other readers open an image to tell its name.
            step = 1 if isinstance(images, FolderImages | ArrayImages) else max(1, len(images) // LOOKED_AT)
            names = (images.name(index).removeprefix(f"{data_dir}/") for index in range(0, len(images), step))
            found[f"{kind} image names"] = _digest(names)
            labels = images.labels()
            found[f"{kind} labels"] = "" if labels is None else hashlib.sha256(labels.tobytes()).hexdigest()
    found["images held out"] = _digest(data.held_out or ())
    found["updates per epoch"] = data.train.updates
    return found


def _digest(names: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\n".encode("utf-8", "surrogateescape"))  # a file name may be no UTF-8
    return digest.hexdigest()
