"""A trained model as one file that runs without grassy: ONNX, or torch's own exported program."""

import contextlib
import io
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grassy.atomic import write_atomically
from grassy.extras import needs
from grassy.inference.load import load
from grassy.inference.outliers import OutlierScores, can_be_exported
from grassy.inference.save import publish
from grassy.runs.hub import is_folder_of_hub
from grassy.runs.weights import Description, read_description, weights_file
from grassy.spelling import nearest

FORMATS = (".onnx", ".pt2")
#: How far the logits of the file may be from the model's, as a part of the largest logit.
TOLERANCE = 1e-3
#: What an .onnx file gives, in this order.
OUTPUTS = ["logits", "outlier_score"]
#: What the file says about the images it takes and the classes it knows.
DESCRIBED = (
    *("model", "head", "num_classes", "class_names", "img_size", "crop_pct", "interpolation", "mean", "std"),
    *("outlier_threshold", "outlier_rate"),
)


@needs("export", extra="export")
def export(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    batch: int | str = "dynamic",
    opset: int | None = None,
) -> Path:
    """Write the model of a checkpoint to an .onnx or .pt2 file, check the file against the model and print the result.

    Or, if `output` has no suffix, to a folder for the Hugging Face hub (see `grassy.save`).

    The file takes normalised "images" (B, 3, S, S) of float32 and gives "logits" (B, C). An .onnx file also gives
    "outlier_score" (B,), if the model has one head on features. It holds, as JSON under the
    name "grassy" (in .pt2 the extra file "grassy.json"), the class names and how images are prepared.

    batch: "dynamic" for any number of images, or the one number that the file will take.
    opset: of ONNX; None leaves it to torch.

    A file whose logits differ by more than `TOLERANCE` is not kept, and a ValueError says so. Weights beyond 1.5 GB do
    not fit into the one file of ONNX and lie beside it in a file `.onnx.data`.
    """
    output = Path(output)
    suffix = output.suffix.lower()
    to_folder = not suffix and (not output.is_dir() or is_folder_of_hub(output))
    if not suffix and not to_folder:
        raise ValueError(f"{output} holds other files: name an .onnx or .pt2 file, or a new folder for the hub")
    if suffix not in FORMATS and not to_folder:
        hint = nearest(suffix, FORMATS)
        raise ValueError(f"models are exported to {' or '.join(FORMATS)} files, got {str(output)!r}{hint}")
    if batch != "dynamic" and (not isinstance(batch, int) or batch < 1):
        raise ValueError(f"batch must be 'dynamic' or a positive integer, got {batch!r}")
    if opset is not None and suffix != ".onnx":
        raise ValueError(f"opset is for .onnx files, not {suffix}")
    if to_folder:
        return publish(checkpoint, output)
    if output.is_dir():
        raise ValueError(f"{output} is a folder: name the file to write")
    weights = weights_file(Path(checkpoint))
    description = read_description(weights)
    onnx = suffix == ".onnx"
    model = _Classifier(load(weights), onnx).eval()
    shapes = {"images": {0: torch.export.Dim("batch", min=1)} if batch == "dynamic" else None}
    program = _traced(model, _images(2 if batch == "dynamic" else int(batch), description), shapes)
    text = json.dumps({name: getattr(description, name) for name in DESCRIBED})
    with _all_or_nothing(output) as file:
        run = _write_onnx(program, shapes, opset, text, file) if onnx else _write_pt2(program, text, file)
        if run is None:
            print(f"{output} has not been checked: for that, pip install onnxruntime")
        else:
            print(_check(model, run, (1, 3) if batch == "dynamic" else (int(batch),), description, output))
    return output


class _Classifier(nn.Module):
    """The model with an input that is called `images`, whatever its author called it; with outlier scores if it has."""

    def __init__(self, model: nn.Module, scored: bool) -> None:
        super().__init__()
        self.model = model
        self.scores = OutlierScores(model).__enter__() if scored and can_be_exported(model) else None

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        logits: Tensor = self.model(images)
        scores = None if self.scores is None else self.scores.of_last()
        return logits if scores is None else (logits, scores)


Run = Callable[[Tensor], Any]


def _traced(model: nn.Module, images: Tensor, shapes: dict[str, Any]) -> torch.export.ExportedProgram:
    try:
        with _quiet(), torch.no_grad():
            program = torch.export.export(model, (images,), dynamic_shapes=shapes)
    except Exception as error:  # of a dozen types, most of them private to torch
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        advice = "; a fixed batch size may work" if shapes["images"] else ""
        raise ValueError(f"torch.export cannot trace this model: {reason}{advice}") from error
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)  # with the folders of this machine, which are nobody's business
    return program


def _write_onnx(
    program: torch.export.ExportedProgram, shapes: dict[str, Any], opset: int | None, text: str, file: Path
) -> Run | None:
    """Write the file; a function that runs it, if there is an onnxruntime to do so."""
    import onnxscript  # noqa: F401  (torch needs it, and would say so at length)
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    with _quiet():
        written: Any = torch.onnx.export(
            program,
            dynamo=True,
            dynamic_shapes=shapes,  # for the name of the dimension
            input_names=["images"],
            output_names=OUTPUTS[: len(program.graph_signature.user_outputs)],
            opset_version=opset,
            verbose=False,
        )
        ClearMetadataAndDocStringPass()(written.model)  # a description of torch's graph at every node
    found = written.model.opset_imports[""]
    if opset not in (None, found):
        raise ValueError(f"the model cannot be written in opset {opset} of ONNX, only in {found}")
    written.model.metadata_props["grassy"] = text
    written.save(file)
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; it warns of what it optimises
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda images: tuple(map(torch.from_numpy, session.run(None, {"images": images.numpy()})))


def _write_pt2(program: torch.export.ExportedProgram, text: str, file: Path) -> Run:
    """Write the file; a function that runs it."""
    memory = io.BytesIO()  # because torch, writing to a full disk itself, does not raise: it aborts the process
    with _quiet():
        torch.export.save(program, memory, extra_files={"grassy.json": text})
        file.write_bytes(memory.getbuffer())
        return torch.export.load(file).module()


def _check(model: nn.Module, run: Run, batches: tuple[int, ...], description: Description, output: Path) -> str:
    """How well file and model agree on random images; a ValueError if they do not."""
    difference, largest = 0.0, 0.0
    with torch.no_grad():
        for batch in batches:  # not the one it was traced with
            images = _images(batch, description)
            for expected, found in zip(_outputs(model(images)), _outputs(run(images)), strict=True):
                if found.shape != expected.shape:
                    shapes = tuple(found.shape), tuple(expected.shape)
                    raise ValueError(f"{output} gives {shapes[0]} where the model gives {shapes[1]}")
                difference = max(difference, float((found - expected).abs().max().nan_to_num(torch.inf)))
                largest = max(largest, float(expected.abs().max()))
    agreement = f"largest difference from the model {difference:.1e}, of logits up to {largest:.3g}"
    if not difference <= TOLERANCE * max(1.0, largest):
        raise ValueError(f"{output} has not been kept: {agreement}, which is more than {TOLERANCE:g} of it")
    return f"{output}: {agreement}"


def _outputs(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _images(batch: int, description: Description) -> Tensor:
    generator = torch.Generator().manual_seed(batch)  # and the caller's random numbers are left alone
    return torch.randn(batch, 3, description.img_size, description.img_size, generator=generator)


# ------------------------------------------------------------------------------------------------ files


@contextlib.contextmanager
def _all_or_nothing(output: Path) -> Iterator[Path]:
    """A path to write to, under the right name but in a folder of its own, whose content comes out if all goes well.

    A folder, and not another name beside it, because ONNX writes a second file when the weights are large.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".exporting-", dir=output.parent) as folder:
            yield Path(folder) / output.name
            for part in sorted(Path(folder).iterdir(), reverse=True):  # x.onnx.data before x.onnx
                with part.open("rb") as source:
                    write_atomically(output.parent / part.name, lambda file: shutil.copyfileobj(source, file))
    except OSError as error:  # in the name of the file that was asked for
        raise OSError(error.errno, f"could not be written: {error.strerror or error}", str(output)) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch and onnxscript have to say about their own insides."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
