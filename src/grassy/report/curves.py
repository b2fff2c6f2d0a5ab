"""Read the training curves of a run, written by grassy, Lightning's CSVLogger, TensorBoard or your own loop.

Curves are columns of equal length. The column `epoch` or `step` is the x-axis. `epoch` counts from 0 in files, as in
timm; the page shows it from 1, as training prints it.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from grassy.runs.records import CURVES, SUMMARY
from grassy.schema import MOST_DESCRIPTION, read_text

Columns = dict[str, list[float | None]]

#: Files with one row per epoch or step; the first one found is read.
TABLES = (SUMMARY, "metrics.csv")
EPOCH, STEP = "epoch", "step"
STEPS = (STEP, "global_step", "iteration", "update")
MOST_POINTS = 1000  # per curve
MOST_EVENTS = 2**28  # bytes of TensorBoard events


def curves_of(folder: Path) -> Columns:
    """The curves in the folder of a run: summary.csv, else metrics.csv, else TensorBoard's; empty without any."""
    for name in TABLES:
        if columns := read_curves(folder / name):
            return columns
    for place in (folder / CURVES, folder):
        if columns := read_events(place):
            return columns
    return {}


def read_curves(path: Path) -> Columns:
    """The numeric columns of a CSV file; empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path, MOST_DESCRIPTION), newline="")))
    except csv.Error as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    names = [key for key in (rows[0] if rows else {}) if key is not None]  # None: cells beyond the last name
    columns = {key.strip(): [_number(row[key]) for row in rows] for key in names}
    columns = {key: values for key, values in columns.items() if any(value is not None for value in values)}
    axis, places = _axis(columns, len(rows))
    return _thinned(axis, {key: zip(places, values, strict=True) for key, values in columns.items()})


def _axis(columns: Columns, rows: int) -> tuple[str, list[float]]:
    """The name and values of the x-axis: epochs if no two rows share one, else steps."""
    epochs = columns.pop(EPOCH, None)
    steps = next((found for name in STEPS if (found := columns.pop(name, None)) is not None), None)
    for name, values in ((EPOCH, epochs), (STEP, steps)):
        if values is not None:
            known = [value for value in values if value is not None]
            if len(known) == rows and (name == STEP or len(set(known)) == rows):
                return name, known
    return STEP, [float(row) for row in range(rows)]


def read_events(folder: Path) -> Columns:
    """TensorBoard's scalars in a folder; empty without events or without TensorBoard."""
    files = sorted(folder.glob("events.out.tfevents.*")) if folder.is_dir() else []
    if not files or sum(file.stat().st_size for file in files) > MOST_EVENTS:
        return {}
    try:
        from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
            SCALARS,
            EventAccumulator,
        )
    except ImportError:
        return {}
    try:
        events = EventAccumulator(str(folder), size_guidance={SCALARS: 10 * MOST_POINTS}).Reload()
        series = {
            tag: [(float(event.step), _number(str(event.value))) for event in events.Scalars(tag)]
            for tag in events.Tags()[SCALARS]
        }
    except Exception as error:  # TensorBoard may raise anything for damaged files
        raise ValueError(f"the TensorBoard events in {folder} cannot be read: {error}") from None
    return _thinned(STEP, series)


def _thinned(axis: str, series: Mapping[str, Iterable[tuple[float, float | None]]]) -> Columns:
    """Thin each column evenly to at most MOST_POINTS values, always keeping the last one."""
    kept: dict[str, dict[float, float | None]] = {}
    everywhere: set[float] = set()
    for name, points in series.items():
        known: dict[float, float | None] = {}
        for x, y in points:
            everywhere.add(x)
            if y is not None:
                known[x] = y  # a repeated step keeps its last value
        every = -(-len(known) // MOST_POINTS) or 1
        kept[name] = dict(list(known.items())[::-1][::every][::-1])
    if not kept:
        return {}
    places = sorted(everywhere if len(everywhere) <= MOST_POINTS else set().union(*kept.values()))
    return {axis: [*places], **{name: [points.get(x) for x in places] for name, points in kept.items()}}


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else None
