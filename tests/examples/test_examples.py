"""Every example runs with the library that it is about, learns something, and leaves the subspaces on the manifold."""

import ast
import logging
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT = 1e-6  # of the orthonormality error, as for grassy's own training


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs an example in an empty folder; its variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    logging.disable(logging.WARNING)

    def run_example(name, *options):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
        return runpy.run_path(str(EXAMPLES / f"{name}.py"))

    yield run_example
    logging.disable(logging.NOTSET)
    sys.modules.pop("texts", None)


def trained(found, accuracy):
    assert found["accuracy"] > accuracy
    assert found["error"] < LIMIT


@pytest.mark.slow
def test_lightning(run):
    pytest.importorskip("lightning")
    trained(run("lightning_digits"), 0.9)


@pytest.mark.slow
def test_accelerate(run):
    pytest.importorskip("accelerate")
    trained(run("accelerate_digits"), 0.9)


@pytest.mark.slow
def test_trainer_with_images(run):
    pytest.importorskip("transformers")
    trained(run("trainer_images"), 0.6)


@pytest.mark.slow
def test_trainer_with_text(run):
    pytest.importorskip("transformers")
    found = run("trainer_text")
    trained(found, 0.7)
    assert found["answer"]["label"] in found["MODULES"]
    same = found["loaded"].state_dict()
    assert all(tensor.equal(same[name]) for name, tensor in found["model"].state_dict().items())


@pytest.mark.slow
def test_peft(run):
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    found = run("peft_lora")
    trained(found, 0.6)
    assert found["trained"] < found["total"] / 2
    assert found["difference"] < 1e-4
    assert type(found["merged"].classifier).__name__ == "GrassmannHead"


@pytest.mark.slow
def test_pytorch_metric_learning(run):
    pytest.importorskip("pytorch_metric_learning")
    trained(run("metric_learning"), 0.9)


@pytest.mark.slow
def test_skorch(run):
    pytest.importorskip("skorch")
    found = run("skorch_digits")
    trained(found, 0.9)
    assert all(score > 0.85 for score in found["scores"].values())


@pytest.mark.slow
def test_scikit_learn(run):
    found = run("sklearn_features")
    assert found["accuracy"] > 0.97
    assert found["strange"].mean() > found["usual"].mean()


@pytest.mark.slow
def test_wandb(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("WANDB_SILENT", "true")
    found = run("wandb_offline")
    assert {"loss", "smallest angle between classes", "lr/euclidean", "lr/grassmann"} <= set(found["summary"])
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
def test_mlflow(run, tmp_path):
    pytest.importorskip("mlflow")
    found = run("mlflow_files")
    assert found["logged"].metrics["orthonormality_error"] < LIMIT
    assert found["logged"].params["k"] == "16"
    assert list(tmp_path.glob("mlruns/**/artifacts/model.safetensors"))


@pytest.mark.slow
def test_openvino(run):
    pytest.importorskip("openvino")
    differences = run("openvino_precision")["differences"]
    assert differences["float32"] < 1e-4
    assert differences["default"] < 0.5  # bfloat16 where the CPU has it: a known loss, and not a wrong model


def losses_of(printed):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


@pytest.fixture(scope="module")
def one_process():
    """What the example of a sharded head prints when one process holds all classes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return printed_by("sharded_head", [sys.executable], variables)


def printed_by(name, command, variables=None, *options):
    finished = subprocess.run(
        [*command, str(EXAMPLES / f"{name}.py"), *options],
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    # Rarely, Python ends while a thread of gloo still drops a tensor, and torch aborts. All has been printed by then.
    aborted_at_its_end = "terminate called without an active exception" in finished.stderr
    assert finished.returncode == 0 or aborted_at_its_end, finished.stderr
    return finished.stdout


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("options", [(), ("--fsdp",)])
def test_a_sharded_head_in_two_processes_has_the_losses_of_one(one_process, options):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = printed_by("sharded_head", torchrun, None, *options)
    assert "2 processes, 1000 of 2000 classes in the first" in printed
    assert "1 processes, 2000 of 2000 classes" in one_process
    assert losses_of(printed) == pytest.approx(losses_of(one_process), rel=1e-2)
    (accuracy, error) = re.search(r"top-1 ([\d.]+)\nbases are orthonormal to (\S+)", printed).groups()
    trained({"accuracy": float(accuracy), "error": float(error)}, 0.85)


@pytest.mark.slow
def test_a_million_classes_train_in_less_memory_than_their_logits_take():
    frugal, plain = (
        printed_by("million_classes", [sys.executable], None, "--steps", "3", *options)
        for options in ((), ("--plain",))
    )
    peaks = [float(re.search(r"peak of memory ([\d.]+) GiB", printed)[1]) for printed in (frugal, plain)]
    coordinates = float(re.search(r"all subspaces: ([\d.]+) GiB", plain)[1])
    assert peaks[1] - peaks[0] > coordinates / 2
    assert losses_of(frugal) == pytest.approx(losses_of(plain), rel=1e-3)
    assert losses_of(frugal)[-1] < losses_of(frugal)[0] - 2
    assert float(re.search(r"orthonormal to (\S+)", frugal)[1]) < LIMIT


@pytest.mark.slow
def test_fine_tuning_on_a_folder_saves_a_model_that_knows_its_photos(run):
    pytest.importorskip("torchvision")
    found = run("finetune_folder")
    trained(found, 0.85)
    assert found["classes"] == ["flower", "temple"]
    assert [label.labels[0] for label in found["predictions"]].count("flower") > 50  # of 60


@pytest.mark.slow
def test_outlier_scores_of_subspaces_find_unknown_digits_better_than_softmax(run):
    found = run("open_set", "--seeds", "3")["found"]
    means = {score: sum(values) / len(values) for score, values in found.items()}
    assert means["subspaces"] > 0.93
    assert len(means) == 5
    assert means["subspaces"] > max(mean for score, mean in means.items() if score != "subspaces")


@pytest.mark.slow
def test_the_notebook_runs_and_draws_its_pictures(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = pytest.importorskip("nbformat").read(EXAMPLES / "explore_model.ipynb", 4)
    committed = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert (
        sum("image/png" in output.get("data", {}) for output in committed) == 4
    )  # readers see them before they run it
    assert (EXAMPLES / "explore_model.ipynb").stat().st_size < 400_000
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    printed = "".join(output.get("text", "") for output in outputs)
    assert float(re.search(r"accuracy ([\d.]+)", printed)[1]) > 0.95
    mistakes, rest = re.search(r"mistakes ([\d.]+), of the rest ([\d.]+)", printed).groups()
    assert float(mistakes) > float(rest)
    assert (tmp_path / "explored.html").stat().st_size > 10_000


def test_every_example_has_a_test_and_a_line_in_the_table():
    files = [path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    scripts = [path for path in files if path.stem != "texts"]  # texts.py is imported by two of them
    tests = Path(__file__).read_text()
    table = (EXAMPLES / "README.md").read_text()
    assert scripts
    for path in scripts:
        assert f'"{path.stem}' in tests, path.name
        assert f"[{path.name}]({path.name})" in table, path.name


def test_every_example_is_short_and_says_how_to_run_it():
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) < 100, path.name
        assert path.stem == "texts" or f"examples/{path.name}" in ast.get_docstring(ast.parse(text)), path.name
