"""The benchmarks for GPUs run, as far as a CPU can tell; what they measure is not judged here."""

import gc
import importlib
import json
import re
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks import gpu, gpu_tests, markdown, performance_page, step_plans  # noqa: E402
from grassy.kernels.cuda import step as cuda_step  # noqa: E402

EMPTY = "<!-- table: {} -->\n<!-- end -->\n\n"
FACTS = {"date": "2026-01-02", "gpu": "Some GPU", "cuda": "13.0", "grassy": "0.1.0", "torch": "2.11", "python": "3.11"}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a benchmark as its command does, in one thread, and gives what it has saved."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(name, *arguments):
        output = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments), "--output", str(output)])
        importlib.import_module(f"benchmarks.{name}").main()
        return json.loads(output.read_text())

    yield run
    torch.set_num_threads(threads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["step", "head", "memory", "svd_qr", "drift", "iteration", "gpu_tests"])
def test_without_a_gpu_a_benchmark_says_so_in_one_sentence(name, run, tmp_path):
    with pytest.raises(SystemExit, match=r"^This benchmark needs a CUDA GPU, and torch finds none here\.$"):
        run(name)
    assert not list(tmp_path.iterdir())


def test_what_pytest_says_at_its_end_is_counted():
    assert gpu_tests.counts("....\n40 passed, 170 deselected in 30.72s\n") == {"passed": 40}
    assert gpu_tests.counts("=== 2 failed, 3 passed, 1 error in 1s ===") == {"passed": 3, "failed": 2, "error": 1}
    assert gpu_tests.counts("") == {}


def test_all_files_with_tests_that_need_a_gpu_are_run_there():
    files = {file for file, _ in gpu_tests.SHARES}
    tests = (file for file in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in file.read_text())
    assert files == {str(file.relative_to(ROOT)) for file in tests}


def test_the_benchmark_of_drift_runs_on_a_cpu(run):
    result = run("drift", "--device", "cpu", "--steps", 5, 10, "--classes", 2, "--k", 3, "--n", 40)
    assert [row["step"] for row in result["rows"]] == [0, 5, 10]
    assert max(row[key] for row in result["rows"] for key in ("without_step_5", "with_step_5", "ours")) < 1e-3
    assert result["distance_to_float64"] < 1e-5
    assert 0.005 < result["radians_per_step"]["smallest"] < result["radians_per_step"]["largest"] < 0.1


def test_the_benchmark_of_factorisations_runs_on_a_cpu(run):
    result = run("svd_qr", "--device", "cpu", "--classes", 3, "--n", 20, "--k", 1, 2, "--runs", 1)
    assert [row["k"] for row in result["rows"]] == [1, 2]
    assert all(set(row["ms"]) == {"svd", "qr"} and row["step_ms"] > 0 for row in result["rows"])


@pytest.mark.slow
def test_the_benchmark_of_iterations_runs_on_a_cpu(run):
    options = ["--device", "cpu", "--models", "resnet10t:2", "--image-size", 32, "--rounds", 1]
    result = run("iteration", *options, "--peers")
    assert not result["failed"]
    (row,) = result["rows"]
    assert (row["model"], row["batch"]) == ("resnet10t", 2)
    assert set(row["ms"]) == {"linear", "grassmann", "plain torch", "algorithm 1"}


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["resnet10t:2", "resnet18:8"])
def test_the_benchmark_of_iterations_runs_on_a_gpu(run, model):
    result = run("iteration", "--models", model, "--image-size", 64, "--rounds", 1, "--peers")
    assert not result["failed"]
    assert set(result["rows"][0]["ms"]) == {"linear", "grassmann", "plain torch", "algorithm 1"}
    assert "peers_failed" not in result["rows"][0]


def test_a_captured_graph_keeps_what_its_work_has_allocated(monkeypatch):
    replayed = []
    nothing = mock.MagicMock()
    for name in ("Stream", "current_stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, nothing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: mock.Mock(replay=lambda: replayed.append(1)))
    state = torch.zeros(3)
    alive = weakref.ref(state)
    run = gpu.captured(lambda state=state: state.add_(1))
    del state
    gc.collect()
    before = alive()
    assert before is not None
    run()
    assert replayed == [1]
    assert before.eq(4).all()  # three runs to warm up, one to capture, none by hand


@pytest.mark.parametrize("capability", [(9, 0), (8, 6)])
@pytest.mark.parametrize(("k", "n"), [(8, 384), (8, 1024), (4, 100), (1, 7), (16, 512)])
def test_the_plans_that_are_tried_differ_and_fit(k, n, capability):
    own, *others = step_plans.candidates(k, n, capability)
    assert own == cuda_step.plan(k, n, capability)
    assert others
    assert len({own, *others}) == 1 + len(others)
    for chosen in others:
        assert chosen.cluster * chosen.columns >= n
        assert chosen.cluster == 1 or capability == (9, 0)
        assert chosen.blocks * (chosen.shared_bytes + 1024) <= 1024 * (228 if capability == (9, 0) else 100)
        assert chosen.blocks * chosen.warps * 32 * 64 <= 2**16
        # What launch.cuh asserts.
        assert chosen.warps % (chosen.rows // 8) == 0
        assert 32 * chosen.warps >= (32 if chosen.rows == 8 else chosen.rows**2 // 4)
    before = cuda_step.plan, cuda_step._pause
    with step_plans.taken(others[0], 0.5):
        assert cuda_step.plan(k, n, capability) == others[0]
        assert cuda_step._pause(others[0], rounds=False) > 0
    assert (cuda_step.plan, cuda_step._pause) == before


def test_a_thousand_small_classes_can_be_one_round():
    plans = list(step_plans.candidates(8, 384, (9, 0)))
    assert any(132 * chosen.blocks // chosen.cluster >= 1000 for chosen in plans)


@pytest.mark.parametrize("shape", ["8x384", "1000x8", "0x8x384", "1000xax384", "1000x32x384"])
def test_a_shape_that_cannot_be_tried_is_refused(shape, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["step_plans", shape])
    with pytest.raises(SystemExit):
        step_plans.main()
    assert f"got '{shape}'" in capsys.readouterr().err


def step_results():
    rows = []
    for k in (4, 8):
        row = {"classes": 1000, "k": k, "n": 2048, "implementation": "cuda", "floor_ms": 0.01 * k, "step_ms": 0.02 * k}
        row |= {"copy_ms": 0.045, "launch_ms": 0.005}
        row |= {"step_over_floor": 2.0, "all_ms": {"auto": 0.02 * k, "reference": 0.3}}
        rows.append({**row, "algorithm_1_ms": 40 * k, "algorithm_1_over_step": 2e3})
    del rows[0]["algorithm_1_ms"], rows[0]["algorithm_1_over_step"], rows[0]["all_ms"]["reference"]
    return {**FACTS, "copy_bytes_per_ms": 4e9, "rows": rows}


def results():
    shape = {"batch": 1024, "n": 768, "classes": 21841, "k": 8}
    times = {"linear C*k": 2.0, "fused": 3.0, "logits": 4.0, "naive": 9.0, "linear C": 0.5}
    ratios = {name: value / 2 for name, value in times.items()}
    large = {**shape, "implementation": "triton", "peak_gib": 24.6, "step_ms": 50.0, "eager_ms": 60.0, "sum_ms": 40.0}
    large |= {"four_products_ms": 27.0, "five_passes_ms": 10.0, "cast_ms": 3.0, "step_over_sum": 1.25}
    large |= {"product_tflops": 640.0, "copy_bytes_per_ms": 4e9, "eager_over_sum": 1.5}
    factorised = {"classes": 1000, "n": 2048, "k": 8, "ms": {"svd gesvda": 1.2, "qr": 88.0}, "step_ms": 0.1}
    errors = {"without_step_5": 1.9e-5, "with_step_5": 3e-7, "ours": 2e-7}
    return {
        "step": step_results(),
        "head": {
            **FACTS,
            "rows": [{**shape, "ms": times, "over_yardstick": ratios, "fused_products": 4, "yardstick_tflops": 600.0}],
        },
        "memory": {
            **FACTS,
            **shape,
            "weight_mib": 512,
            "extra_mib": {"fused": 100, "logits": 500, "naive": 2000},
            "large": large,
        },
        "svd_qr": {**FACTS, "rows": [{**factorised, "paper_ms": {"svd": 23.2, "qr": 70.9}}]},
        "drift": {
            **FACTS,
            **{"classes": 10, "k": 8, "n": 256, "qr_every": 5, "distance_to_float64": 1.8e-7, "paper": {"100": 1.9e-5}},
            "rows": [{"step": 100, **errors}],
            "radians_per_step": {"smallest": 0.02, "largest": 0.04},
        },
        "iteration": {
            **FACTS,
            **{"classes": 1000, "k": 8, "image_size": 224, "failed": {"vgg13_bn:32": "out of memory"}},
            "rows": [
                {"model": name, "batch": 32, "ms": {"linear": 20.0, "grassmann": 20.5, **more}, "overhead_percent": 2.5}
                for name, more in (("resnet50", {"plain torch": 22.0, "algorithm 1": 45.0}), ("resnet50d", {}))
            ],
        },
    }


def test_the_tables_are_filled_from_the_results_and_the_rest_of_the_page_is_left_alone(tmp_path, monkeypatch):
    for name, result in results().items():
        (tmp_path / f"{name}_gpu.json").write_text(json.dumps(result))
    factorised = {"classes": 5, "n": 9, "k": 2, "step_ms": 2.0, "ms": {"svd": 5.0, "qr": 3.0}, "implementation": "cpp"}
    tests = {"tests/test_a.py": {"passed": 3}, "tests/test_b.py": {"passed": 4, "failed": 1}}
    (tmp_path / "gpu_tests_gpu.json").write_text(json.dumps({**FACTS, "commit": 40 * "c", "files": tests}))
    (tmp_path / "svd_qr_cpu.json").write_text(json.dumps({**FACTS, "rows": [factorised]}))
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text(f"By hand.\n\n{''.join(EMPTY.format(name) for name in performance_page.TABLES)}The end.\n")
    monkeypatch.setattr(sys, "argv", ["page", "--results", str(tmp_path), "--page", str(page)])
    performance_page.main()
    text = page.read_text()
    assert text.startswith("By hand.\n\n<!-- table: step_gpu -->\n| classes")
    assert text.endswith("<!-- end -->\n\nThe end.\n")
    assert text.count("\nSome GPU, torch 2.11, grassy 0.1.0, 2026-01-02.\n") == 7
    assert text.count("grassy 0.1.0 at ccccccc, 2026-01-02.") == 1
    assert "| ResNet50 | 32 | 20.00 | 20.50 | +2.5 % | +10 % | +125 % | – |" in text
    assert "| test_b.py | 4 | 1 |" in text
    assert "| 5 x 2 x 9 | 2.5 | 1.5 | – | – | cpp |" in text
    step = "| 1,000 x 4 x 2,048 | 40.0 | 45.0 | 5.0 | 80.0 | 2.00 |"
    for piece in (step, "at 640 TFLOP/s | 27.0 ms |", "| 1.25 |", "| 35 % |", "| 23.2 | 70.9 |"):
        assert piece in text, piece
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 9  # two of memory
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert {picture.name for picture in (page.parent / "images").iterdir()} == {
        "step_roofline.png",
        "iteration_time.png",
    }


def test_a_benchmark_without_results_leaves_its_table_as_it_is(tmp_path):
    (tmp_path / "step_gpu.json").write_text(json.dumps(step_results()))
    found = performance_page.tables(tmp_path, tmp_path)
    assert list(found) == ["step_gpu"]
    page = tmp_path / "page.md"
    page.write_text("<!-- table: step_gpu -->\nold\n<!-- end -->\n<!-- table: head_gpu -->\nkept\n<!-- end -->\n")
    markdown.fill(page, found)
    assert "old" not in page.read_text()
    assert "kept" in page.read_text()


def test_a_mark_that_is_not_closed_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table: a -->\ntext\n<!-- table: b -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="no <!-- end --> for <!-- table: a -->"):
        markdown.fill(page, {"a": "new"})
    assert "text" in page.read_text()


def test_the_page_in_docs_has_the_figures_of_the_results(tmp_path):
    page = tmp_path / "performance.md"
    text = (ROOT / "docs" / "performance.md").read_text()
    page.write_text(text)
    assert markdown.marks(page) == list(performance_page.TABLES)
    markdown.fill(page, performance_page.tables(ROOT / "benchmarks" / "results", tmp_path))
    assert page.read_text() == text, "run python -m benchmarks.performance_page"
