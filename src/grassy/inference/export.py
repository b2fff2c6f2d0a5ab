"""Export a trained model as one file that runs without grassy: ONNX, or torch's own exported program."""

import contextlib
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grassy.atomic import copy_atomically
from grassy.extras import needs
from grassy.inference.load import load
from grassy.inference.outliers import OutlierScores, can_be_exported
from grassy.inference.save import publish
from grassy.runs.hub import is_folder_of_hub
from grassy.runs.weights import PREPARATION, Description, check_rgb, read_description, weights_file
from grassy.spelling import nearest

FORMATS = (".onnx", ".pt2")
#: Largest allowed difference between the file's and the model's logits, relative to the largest logit.
TOLERANCE = 1e-3
#: The outputs of an .onnx file, in this order.
OUTPUTS = ["logits", "outlier_score"]
#: The fields of the description that an exported file holds.
DESCRIBED = (
    *("model", "head", "num_classes", "class_names", "img_size", *PREPARATION),
    *("outlier_threshold", "outlier_rate"),
)


@needs("export", extra="export")
def export(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    batch: int | str = "dynamic",
    opset: int | None = None,
) -> Path:
    """Export a checkpoint to an .onnx or .pt2 file, compare the file with the model and print the difference.

    An `output` without a suffix is a folder for the Hugging Face Hub (see `grassy.save`).

    The file maps normalised float32 "images" (B, 3, S, S) to "logits" (B, C). An .onnx file also returns
    "outlier_score" (B,), if the model has one head on features. The class names and the preprocessing are in the file
    as JSON: in ONNX under the metadata key "grassy", in .pt2 as the extra file "grassy.json".

    ONNX stores weights beyond 1.5 GB in a second file, `.onnx.data`.

    Args:
        checkpoint: A file of weights, or the folder of a run.
        output: An .onnx file, a .pt2 file, or a folder.
        batch: "dynamic" for any batch size, or the one batch size that the file will accept.
        opset: The ONNX opset version; None for torch's default.

    Returns:
        The path of the written file or folder.

    Raises:
        ValueError: If the logits of the file differ by more than `TOLERANCE`; the file is then deleted.
    """
    output = Path(output)
    suffix = output.suffix.lower()
    to_folder = not suffix and (not output.is_dir() or is_folder_of_hub(output))
    if not suffix and not to_folder:
        raise ValueError(f"{output} holds other files: give an .onnx or .pt2 file, or a new folder for the Hub")
    if suffix not in FORMATS and not to_folder:
        hint = nearest(suffix, FORMATS)
        raise ValueError(f"output must be an .onnx or .pt2 file, or a folder, got {str(output)!r}{hint}")
    if batch != "dynamic" and (not isinstance(batch, int) or batch < 1):
        raise ValueError(f"batch must be 'dynamic' or a positive integer, got {batch!r}")
    if opset is not None and suffix != ".onnx":
        raise ValueError(f"opset is for .onnx files, got output {str(output)!r}")
    if to_folder:
        publish(checkpoint, output)
        print(f"Saved {output}, a folder for the Hugging Face Hub")
        return output
    if output.is_dir():
        raise ValueError(f"{output} is a folder: give the file to write")
    weights = weights_file(Path(checkpoint))
    description = read_description(weights)
    check_rgb(description, weights)
    onnx = suffix == ".onnx"
    model = _Classifier(load(weights), onnx).eval()
    shapes = {"images": {0: torch.export.Dim("batch", min=1)} if batch == "dynamic" else None}
    program = _traced(model, _images(2 if batch == "dynamic" else int(batch), description), shapes)
    text = json.dumps({name: getattr(description, name) for name in DESCRIBED})
    with _all_or_nothing(output) as file:
        run = _write_onnx(program, shapes, opset, text, file) if onnx else _write_pt2(program, text, file)
        if run is None:
            print(f"Saved {output}; to have it checked against the model, pip install onnxruntime")
        else:
            print(_check(model, run, (1, 3) if batch == "dynamic" else (int(batch),), description, output))
    return output


class _Classifier(nn.Module):
    """The model with its input renamed to `images`, and with outlier scores if it has them."""

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
    except Exception as error:  # a dozen types, most of them private to torch
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        advice = "; a fixed batch size may work" if shapes["images"] else ""
        raise ValueError(f"torch.export cannot trace this model: {reason}{advice}") from error
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)  # it would publish paths of this machine
    return program


def _write_onnx(
    program: torch.export.ExportedProgram, shapes: dict[str, Any], opset: int | None, text: str, file: Path
) -> Run | None:
    """Write the file. Return a function that runs it, or None without onnxruntime."""
    import onnxscript  # noqa: F401  (torch needs it; here a missing package gives a short message)
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    with _quiet():
        written: Any = torch.onnx.export(
            program,
            dynamo=True,
            dynamic_shapes=shapes,  # names the dimension
            input_names=["images"],
            output_names=OUTPUTS[: len(program.graph_signature.user_outputs)],
            opset_version=opset,
            verbose=False,
        )
        ClearMetadataAndDocStringPass()(written.model)  # torch describes its graph at every node
    found = written.model.opset_imports[""]
    if opset not in (None, found):
        raise ValueError(f"opset must be {found} for this model, got {opset}")
    written.model.metadata_props["grassy"] = text
    written.save(file)
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only: it warns about its own optimisations
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda images: tuple(map(torch.from_numpy, session.run(None, {"images": images.numpy()})))


def _write_pt2(program: torch.export.ExportedProgram, text: str, file: Path) -> Run:
    """Write the file. Return a function that runs it."""
    memory = io.BytesIO()  # if torch itself wrote to a full disk, it would abort the process instead of raising
    with _quiet():
        torch.export.save(program, memory, extra_files={"grassy.json": text})
        file.write_bytes(memory.getbuffer())
        return torch.export.load(file).module()


def _check(model: nn.Module, run: Run, batches: tuple[int, ...], description: Description, output: Path) -> str:
    """Compare file and model on random images and describe the difference; a ValueError if it is too large."""
    difference, largest = 0.0, 0.0
    with torch.no_grad():
        for batch in batches:  # other batch sizes than the traced one
            images = _images(batch, description)
            for expected, found in zip(_outputs(model(images)), _outputs(run(images)), strict=True):
                if found.shape != expected.shape:
                    shapes = tuple(found.shape), tuple(expected.shape)
                    raise ValueError(f"{output} returns shape {shapes[0]}, but the model returns {shapes[1]}")
                difference = max(difference, float((found - expected).abs().max().nan_to_num(torch.inf)))
                largest = max(largest, float(expected.abs().max()))
    agreement = f"its logits (up to {largest:.3g}) differ from the model's by at most {difference:.1e}"
    if not difference <= TOLERANCE * max(1.0, largest):
        raise ValueError(f"{output} has been deleted: {agreement}, more than the relative tolerance {TOLERANCE:g}")
    return f"Saved {output}; {agreement}"


def _outputs(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _images(batch: int, description: Description) -> Tensor:
    generator = torch.Generator().manual_seed(batch)  # leaves the global random state alone
    return torch.randn(batch, 3, description.img_size, description.img_size, generator=generator)


# ------------------------------------------------------------------------------------------------ files


@contextlib.contextmanager
def _all_or_nothing(output: Path) -> Iterator[Path]:
    """A path in a temporary folder to write to. Its files move beside `output` if no exception is raised.

    A folder rather than a temporary name, because ONNX writes a second file when the weights are large.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".exporting-", dir=output.parent) as folder:
            yield Path(folder) / output.name
            for part in sorted(Path(folder).iterdir(), reverse=True):  # x.onnx.data before x.onnx
                copy_atomically(part, output.parent / part.name)
    except OSError as error:  # report the user's file, not the temporary one
        raise OSError(error.errno, f"could not be written: {error.strerror or error}", str(output)) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the messages of torch and onnxscript about their own internals."""
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
