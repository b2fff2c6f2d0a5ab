"""The benchmark of the input runs without a GPU, and its results become a table and a picture."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.performance_input import command, input_from_files  # noqa: E402

from benchmarks import input as input_benchmark  # noqa: E402

PARTS = {"disk": 20.0, "decode": 800.0, "augment": 400.0, "collate": 30.0}


def result(**changes):
    rates = {"grassy, packed": 1500.0, "grassy": 800.0, "timm": 500.0, "torchvision": 400.0}
    return {
        "gpu": None,
        "size": [500, 375],
        "workers": 0,
        "files": 10_000,
        "batch_size": 256,
        "model": None,
        "loaders": {"crop and flip": {"medians": rates, "images_per_second": {name: [1.0] * 5 for name in rates}}},
        "training": {},
        "stages_us": {"crop and flip": {"before": PARTS, "now": PARTS}},
        "device": {"copy of uint8 to the device": 200_000.0},
    } | changes


def test_results_of_a_cpu_and_of_a_gpu_become_tables_and_pictures(tmp_path):
    text = input_from_files(result(), tmp_path)
    assert "| crop and flip | 1,500 | 800 | 500 | 400 | 1.60 | 3.00 |" in text
    assert command(result()) == "python -m benchmarks.input --workers 0"
    medians = {"grassy, packed": 4300.0, "grassy": 4000.0, "timm": 2000.0, "torchvision": 1500.0, "resident": 4400.0}
    on_gpu = result(gpu="H200", workers=16, model="resnet50", training={"crop and flip": {"medians": medians}})
    text = input_from_files(on_gpu, tmp_path)
    assert "| crop and flip, training | 4,300 | 4,000 | 2,000 | 1,500 | 4,400 | 2.00 | 2.15 | 0.98 |" in text
    assert command(on_gpu | {"batches": 160}) == "python -m benchmarks.input --train resnet50"
    assert command(on_gpu) == "python -m benchmarks.input --train resnet50 --batches 20"  # as earlier results ran
    small = command(result(files=48, batch_size=8, batches=5, grain=5.0))
    assert small == "python -m benchmarks.input --workers 0 --grain 5 --count 48 --batch-size 8 --batches 5"
    input_from_files(result(size=[4000, 3000]), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"input_cpu.png", "input_gpu.png", "input_large_cpu.png"}


@pytest.mark.slow
def test_the_benchmark_measures_loaders_training_parts_and_the_device(tmp_path, monkeypatch):
    options = (
        "--count 4 --batch-size 2 --batches 1 --turns 1 --workers 0 --size 300 260 --train test_resnet --device cpu"
    )
    output = tmp_path / "found.json"
    places = ["--files", str(tmp_path / "files"), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["input", *options.split(), *places])
    threads = torch.get_num_threads()
    input_benchmark.main()
    torch.set_num_threads(threads)
    found = json.loads(output.read_text())
    for title in input_benchmark.AUGMENTATIONS:
        assert set(found["loaders"][title]["medians"]) == set(input_benchmark.CONTESTANTS)
        assert set(found["training"][title]["medians"]) == {*input_benchmark.CONTESTANTS, "resident"}
        assert set(found["stages_us"][title]["now"]) == set(PARTS)
    assert "crop and flip, training" in input_from_files(found, tmp_path)


def test_a_turn_has_ten_batches_from_each_worker():
    """In fewer waves of a batch from each worker, the last wave decides the rate."""
    assert [input_benchmark.whole_waves(workers) for workers in (0, 2, 3, 16)] == [20, 20, 30, 160]
