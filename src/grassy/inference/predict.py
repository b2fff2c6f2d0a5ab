"""Predict the classes of images without labels: the top k, their probabilities and an outlier score."""

import codecs
import csv
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from grassy.atomic import write_atomically
from grassy.data.decode import read_rgb, reason_for
from grassy.data.image_files import image_suffixes, walk
from grassy.data.transforms import Transform, eval_transform
from grassy.distributed.processes import find_device
from grassy.extras import needs
from grassy.inference.load import load
from grassy.inference.outliers import FEWEST, OutlierScores
from grassy.runs.weights import Description, check_rgb, read_description, weights_file
from grassy.spelling import nearest
from grassy.terminal import bar, printable, spreadsheet_safe

MANY = 100  # show a progress bar from this number of images
NAMED = 5  # name at most this many unreadable images on the terminal


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, best first; or, in `error`, why there are none.

    Args:
        path: The image file.
        labels: Class names, or class indices if the training data had no names.
        probabilities: Their probabilities, in the same order.
        outlier_score: The head's score in [0, 1]; None for a model with several heads, or a head on a feature map.
        outlier: Whether the score exceeds `outlier_threshold`; None without a score or a threshold.
        error: Why the image could not be read; None if it could.
        outlier_threshold: The argument of `predict`, or else the model's threshold.
    """

    path: Path
    labels: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    outlier_score: float | None = None
    outlier: bool | None = None
    error: str | None = None
    outlier_threshold: float | None = None


@needs("predict", extra="train")
def predict(
    checkpoint: str | os.PathLike[str],
    paths: Iterable[str | os.PathLike[str]],
    topk: int = 5,
    batch_size: int = 64,
    device: torch.device | str | None = None,
    outlier_threshold: float | None = None,
) -> Iterator[Prediction]:
    """Yield a prediction for each image file, and for each image in a folder, in the order of `paths`.

    Wrong arguments raise at once, before the first prediction. An image that cannot be read yields a prediction with an
    error, and the others follow.

    Args:
        checkpoint: A file of weights, or the folder of a run.
        paths: Image files, and folders of images.
        topk: Number of classes per prediction.
        batch_size: Images per forward pass.
        device: None or "auto" for a GPU if there is one.
        outlier_threshold: None for the model's threshold, which 5 % of its validation images exceed.

    Returns:
        An iterator over the predictions.

    Raises:
        ValueError: If an argument is out of range, or if a path does not exist or holds no images.
    """
    return predict_files(checkpoint, find_images(paths), topk, batch_size, device, outlier_threshold)


def predict_files(
    checkpoint: str | os.PathLike[str],
    files: Sequence[Path],
    topk: int = 5,
    batch_size: int = 64,
    device: torch.device | str | None = None,
    outlier_threshold: float | None = None,
) -> Iterator[Prediction]:
    """`predict` for the files that `find_images` found, which need not be readable."""
    for name, value in (("topk", topk), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if outlier_threshold is not None and not 0 <= outlier_threshold <= 1:
        raise ValueError(f"outlier_threshold must lie in [0, 1], got {outlier_threshold}")
    chosen = device if isinstance(device, torch.device) else find_device(device or "auto")
    weights = weights_file(Path(checkpoint))
    description = read_description(weights)
    check_rgb(description, weights)
    model = load(weights, chosen)
    view = (description.crop_pct, description.interpolation, description.crop_mode, description.mean)
    transform = eval_transform(description.img_size, *view)
    if outlier_threshold is not None:
        description = dataclasses.replace(description, outlier_threshold=outlier_threshold)
    return _predictions(model, description, transform, files, topk, batch_size, chosen)


def find_images(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The given files, and all images below the given folders that are not hidden, sorted by name."""
    suffixes = image_suffixes()
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            below = (Path(folder, name) for folder, _, names in walk(path) for name in names)
            found = sorted(file for file in below if file.suffix.lower() in suffixes)
            if not found:
                raise ValueError(f"{path} holds no images ({', '.join(sorted(suffixes))})")
            files += found
        elif path.is_file():
            files.append(path)  # whatever its suffix: the user asked for it
        else:
            raise ValueError(f"there is no image or folder {path}")
    if not files:
        raise ValueError("which images? give files or folders")
    return files


# ------------------------------------------------------------------------------------------------ the model


@torch.inference_mode()
def _predictions(
    model: nn.Module,
    description: Description,
    transform: Transform,
    files: Sequence[Path],
    topk: int,
    batch_size: int,
    device: torch.device,
) -> Iterator[Prediction]:
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (description.mean, description.std))
    scores = OutlierScores(model).__enter__()  # never left: nobody else uses this model
    for batch in _read_ahead(files, batch_size, transform):
        images = [image for _, image in batch if isinstance(image, Tensor)]
        rows: Iterator[tuple[Any, ...]] = iter(())
        if images:
            try:
                pixels = torch.stack(images).to(device).float() / 255
                logits = model((pixels - mean) / std)
                found = scores.of_last()
            except torch.OutOfMemoryError:
                raise ValueError(
                    f"{device} ran out of memory with batches of {batch_size}: give a smaller batch_size"
                ) from None
            best = logits.float().softmax(-1).topk(min(topk, logits.shape[-1]))
            outliers = [None] * len(images) if found is None else found.tolist()
            rows = zip(best.indices.tolist(), best.values.tolist(), outliers, strict=True)
        for path, image in batch:
            yield Prediction(path, error=image) if isinstance(image, str) else _named(path, description, *next(rows))


def _named(
    path: Path, description: Description, classes: list[int], probabilities: list[float], outlier: float | None
) -> Prediction:
    if any(probability != probability for probability in probabilities):
        return Prediction(path, error="the model's logits for this image are not finite")
    names = description.class_names or []  # a head may have more classes than the data has names
    labels = tuple(names[index] if index < len(names) else str(index) for index in classes)
    limit = description.outlier_threshold
    flagged = None if outlier is None or limit is None else outlier > limit
    return Prediction(path, labels, tuple(probabilities), outlier, flagged, outlier_threshold=limit)


def _read_ahead(files: Sequence[Path], size: int, transform: Transform) -> Iterator[list[tuple[Path, Tensor | str]]]:
    """Batches of images, or of error messages. Threads read the next batch while the model uses the current one."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes and resizes without the GIL
        ahead: tuple[Sequence[Path], Iterator[Tensor | str]] | None = None
        for start in range(0, len(files), size):
            part = files[start : start + size]
            coming = part, pool.map(lambda path: _read(path, transform), part)
            if ahead is not None:
                yield list(zip(*ahead, strict=True))
            ahead = coming
        if ahead is not None:
            yield list(zip(*ahead, strict=True))


def _read(path: Path, transform: Transform) -> Tensor | str:
    try:
        return transform(read_rgb(path))
    except Exception as error:  # decoders raise anything for a damaged file, even SyntaxError
        return reason_for(error)


# ------------------------------------------------------------------------------------------------ output


def write_predictions(
    predictions: Iterable[Prediction], output: str | os.PathLike[str] | None = None, total: int | None = None
) -> int:
    """Print predictions, or write them atomically to a .csv or .jsonl file. Return the number of unreadable images.

    total: the number of predictions, for the progress bar.
    """
    output = None if output is None else Path(output)
    check_output(output)
    failures: list[Prediction] = []
    count = scored = flagged = 0
    threshold: float | None = None
    # Lines on the same terminal would break the bar.
    shown = total is not None and total >= MANY and not (output is None and sys.stdout.isatty())

    def counted() -> Iterator[Prediction]:
        nonlocal count, scored, flagged, threshold
        for prediction in predictions:
            count += 1
            scored += prediction.outlier_score is not None
            flagged += bool(prediction.outlier)
            threshold = prediction.outlier_threshold if prediction.error is None else threshold
            if prediction.error is not None:
                failures.append(prediction)
            yield prediction
            advance()

    with bar("images", total or 0, shown) as advance:
        if output is None:
            _print(counted())
        else:
            write = FORMATS[output.suffix.lower()]
            write_atomically(output, lambda file: write(counted(), file))
    if output is not None:
        print(f"Saved {output} with predictions for {count - len(failures)} images", file=sys.stderr)
    if scored:
        print(_about_outliers(scored, flagged, threshold), file=sys.stderr)
    if failures:
        print(f"grassy: {len(failures)} of {count} images could not be read", file=sys.stderr)
        if output is not None:  # on the terminal, each has been printed in its line already
            for failure in failures[:NAMED]:
                print(f"  {printable(str(failure.path))}: {printable(failure.error or '')}", file=sys.stderr)
            if len(failures) > NAMED:
                print(f"  and {len(failures) - NAMED} more, named in {output}", file=sys.stderr)
    return len(failures)


def _about_outliers(scored: int, flagged: int, threshold: float | None) -> str:
    if threshold is None:
        return (
            "this model has no outlier threshold, so no image is flagged: `grassy validate RUN --json` computes one "
            f"from {FEWEST} or more labelled images; pass it as --outlier-threshold"
        )
    so = ": they look like none of the classes" if flagged else ""
    return f"{flagged} of {scored} images are above the outlier threshold {threshold:.3f}{so}"


def check_output(output: Path | None) -> None:
    """Raise a ValueError for a file that `write_predictions` cannot write."""
    if output is None:
        return
    if output.suffix.lower() not in FORMATS:
        hint = nearest(output.suffix, FORMATS)
        raise ValueError(f"output must be a {' or '.join(FORMATS)} file, got {str(output)!r}{hint}")
    if output.is_dir():
        raise ValueError(f"{output} is a folder: give the file to write")


def _print(predictions: Iterator[Prediction]) -> None:
    """Print one line per image, in columns that widen as longer entries appear."""
    path_width = label_width = 0
    while chunk := list(itertools.islice(predictions, 64)):
        paths = [printable(str(prediction.path)) for prediction in chunk]
        path_width = max(path_width, *map(len, paths))
        labels = [[printable(label) for label in prediction.labels] for prediction in chunk]
        label_width = max([label_width, *(len(label) for row in labels for label in row)])
        for path, row, prediction in zip(paths, labels, chunk, strict=True):
            columns = [f"{path:<{path_width}}"]
            columns += [
                f"{p:7.2%} {name:<{label_width}}" for name, p in zip(row, prediction.probabilities, strict=True)
            ]
            if prediction.outlier_score is not None:
                columns.append(f"outlier {prediction.outlier_score:.3f}{' FLAGGED' if prediction.outlier else ''}")
            if prediction.error is not None:
                columns.append(f"error: {printable(prediction.error)}")
            print("  ".join(columns).rstrip())
        sys.stdout.flush()


def _write_csv(predictions: Iterator[Prediction], file: IO[bytes]) -> None:
    """One row per image: path, label_1, probability_1, label_2, ..., outlier_score, outlier, error.

    File and class names are untrusted: no cell starts like a spreadsheet formula.
    """
    first: list[Prediction] = []  # up to the first one with labels, which determines the number of columns
    for prediction in predictions:
        first.append(prediction)
        if prediction.error is None:
            break
    k = max((len(prediction.labels) for prediction in first), default=0)
    ranks = [column for rank in range(1, k + 1) for column in (f"label_{rank}", f"probability_{rank}")]
    # File names are bytes: those that are not UTF-8 are written unchanged. Lines end with CRLF (RFC 4180); with another
    # ending, csv would leave a carriage return in a name unquoted.
    writer = csv.writer(codecs.getwriter("utf-8")(file, "surrogateescape"))
    writer.writerow(["path", *ranks, "outlier_score", "outlier", "error"])
    for p in itertools.chain(first, predictions):
        labels = map(spreadsheet_safe, p.labels)
        pairs = list(itertools.chain.from_iterable(zip(labels, p.probabilities, strict=True))) or [""] * 2 * k
        writer.writerow([_path_in_csv(p.path), *pairs, p.outlier_score, p.outlier, spreadsheet_safe(p.error or "")])


def _path_in_csv(path: Path) -> str:
    """The path in a form that still opens the file but does not start like a formula."""
    text = str(path)
    return text if spreadsheet_safe(text) == text else os.path.join(os.curdir, text)


def _write_json_lines(predictions: Iterator[Prediction], file: IO[bytes]) -> None:
    """One JSON object per line: path, labels, probabilities and outlier_score, or path and error."""
    for p in predictions:
        content: dict[str, Any] = {"path": str(p.path)}
        if p.error is None:
            content |= {"labels": p.labels, "probabilities": p.probabilities, "outlier_score": p.outlier_score}
            content |= {} if p.outlier is None else {"outlier": p.outlier}
        else:
            content["error"] = p.error
        file.write(json.dumps(content).encode() + b"\n")


FORMATS: dict[str, Callable[[Iterator[Prediction], IO[bytes]], None]] = {
    ".csv": _write_csv,
    ".jsonl": _write_json_lines,
}
