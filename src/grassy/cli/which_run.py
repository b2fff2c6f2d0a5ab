"""Whether a path is a run and, if it is not, which run the user may mean."""

from pathlib import Path

#: How many runs a message names.
NAMED = 3
#: Prefixes of names that are not paths: models of the Hub, of timm and of torchvision.
ELSEWHERE = ("hf-hub:", "timm/", "torchvision/")


def is_run(path: Path) -> bool:
    """Whether commands can open a path: a file of weights, or a folder that holds one."""
    from grassy.runs.weights import weights_file

    if str(path).startswith(ELSEWHERE):
        return True
    if not path.is_dir():
        return path.is_file() and path.suffix in (".safetensors", ".pth", ".pt")
    try:
        return weights_file(path).exists()
    except ValueError:
        return False


def _runs_in(folder: Path) -> list[Path]:
    """The first few runs in a folder."""
    if not folder.is_dir():
        return []
    found = (entry for entry in sorted(folder.iterdir()) if entry.is_dir() and is_run(entry))
    return [entry for entry, _ in zip(found, range(NAMED), strict=False)]


def check_run(path: Path) -> None:
    """Raise a ValueError for a path that does not exist, or that is a folder of runs. It names runs nearby."""
    if str(path).startswith(ELSEWHERE):
        return
    if not path.exists():
        near = ", ".join(map(str, _runs_in(path.parent)))
        raise ValueError(f"there is no run or file of weights {path}{f'; runs found nearby: {near}' if near else ''}")
    if path.is_dir() and not is_run(path) and (inside := _runs_in(path)):
        raise ValueError(f"{path} is a folder of runs, not a run: name one of them, such as {inside[0]}")
