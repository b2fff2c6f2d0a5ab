"""The cost of the analyses: all principal angles of all pairs of classes, and measures of many features.

Angles: `pairwise_principal_angles` of C random subspaces takes turns with `scipy.linalg.subspace_angles` on a sample of
the pairs. SciPy runs on the CPU in float32, where it is fastest, and in float64, where it is as accurate. The largest
difference from float64 is printed.

`--features` adds time and peak memory of the measures of 200,000 x 2,048 float32 features in 1,000 classes, each in its
own process. On a CPU the peak is that of the whole process (getrusage), with Python, torch and features. On a GPU it is
that of torch's allocations.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

import grassy
from benchmarks.transfer_features import cpu_name, save
from grassy import analysis, geometry

MEASURES: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "variability": lambda features, labels, _: analysis.variability(features, labels),
    "class_separation": lambda features, labels, _: analysis.class_separation(features, labels),
    "class_spectra": lambda features, labels, weight: float(analysis.class_spectra(features, labels, weight).mean()),
    "neural_collapse": lambda features, labels, weight: analysis.neural_collapse(features, labels, weight),
}


def seconds(run: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_angles(classes: int, k: int, n: int, device: str, rounds: int, sample: int) -> dict[str, float]:
    import numpy as np
    from scipy.linalg import subspace_angles

    torch.manual_seed(0)
    weight = geometry.random_subspace(classes, k, n).to(device)
    pairs = [(int(i), int(j)) for i, j in (torch.randperm(classes)[:2] for _ in range(sample))]
    single = weight.cpu().mT.numpy()
    double = single.astype(np.float64)

    def by_scipy(columns: np.ndarray) -> np.ndarray:
        return np.stack([subspace_angles(columns[i], columns[j])[::-1] for i, j in pairs])

    ours = analysis.pairwise_principal_angles(weight)  # warm up, and for the comparison
    first, second = zip(*pairs, strict=True)
    difference = float(np.abs(ours.cpu().numpy()[list(first), list(second)] - by_scipy(double)).max())
    times: dict[str, list[float]] = {"ours": [], "scipy_float32": [], "scipy_float64": []}
    for _ in range(rounds):
        times["ours"].append(seconds(lambda: analysis.pairwise_principal_angles(weight), device))
        times["scipy_float32"].append(seconds(lambda: by_scipy(single), "cpu"))
        times["scipy_float64"].append(seconds(lambda: by_scipy(double), "cpu"))
    total = statistics.median(times["ours"])
    a_pair = total / (classes * (classes - 1) / 2)
    float32, float64 = (statistics.median(times[f"scipy_{kind}"]) / sample for kind in ("float32", "float64"))
    return {
        "classes": classes,
        "k": k,
        "n": n,
        "seconds": total,
        "slowest_seconds": max(times["ours"]),
        "us_a_pair": 1e6 * a_pair,
        "scipy_float32_us_a_pair": 1e6 * float32,
        "scipy_float64_us_a_pair": 1e6 * float64,
        "scipy_float32_over_ours": float32 / a_pair,
        "scipy_float64_over_ours": float64 / a_pair,
        "largest_difference_from_scipy_float64": difference,
    }


def measure_features(name: str, samples: int, width: int, classes: int, device: str) -> dict[str, float | str]:
    """Seconds and peak gigabytes of one measure; call it in a fresh process."""
    torch.manual_seed(0)
    weight = geometry.random_subspace(classes, 8, width).to(device)  # first: making it takes memory for a moment
    labels = torch.randint(classes, (samples,), device=device)
    centers = torch.randn(classes, width, device=device)
    features = torch.empty(samples, width, device=device)
    for rows, of_class in zip(features.split(4096), labels.split(4096), strict=True):
        rows.normal_().add_(centers[of_class]).relu_()
    before = _peak_gigabytes(device)
    spent = seconds(lambda: MEASURES[name](features, labels, weight), device)
    return {
        "measure": name,
        "samples": samples,
        "width": width,
        "classes": classes,
        "seconds": spent,
        "peak_gigabytes_before": before,
        "peak_gigabytes": _peak_gigabytes(device),
    }


def _peak_gigabytes(device: str) -> float:
    """On a CPU of the whole process, since it began."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=200, help="pairs that scipy is timed on")
    parser.add_argument("--features", action="store_true", help="also time and weigh the measures of many features")
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--only", choices=MEASURES, help=argparse.SUPPRESS)  # what the fresh processes are asked
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    size = (args.samples, args.width, args.classes)
    if args.only:
        print(json.dumps(measure_features(args.only, *size, args.device)))
        return

    features = []
    if args.features:  # first, while this process is small: a child inherits its parent's peak
        options = [f"--device={args.device}", f"--samples={size[0]}", f"--width={size[1]}", f"--classes={size[2]}"]
        for name in MEASURES:
            command = [sys.executable, __file__, f"--only={name}", *options]
            reply = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            features.append(row := json.loads(reply))
            print(
                f"{name:>16} of {size[0]:,} x {size[1]:,}: {row['seconds']:.1f} s, peak {row['peak_gigabytes']:.2f} GB"
                f" ({row['peak_gigabytes_before']:.2f} GB before)",
                flush=True,
            )
    angles = []
    for shape in [(1000, 1, 2048), (1000, 8, 2048), (1000, 8, 768)]:
        angles.append(cost := measure_angles(*shape, args.device, args.rounds, args.pairs))
        print(
            f"all pairs of {' x '.join(map(str, shape))}: {cost['seconds']:.2f} s (slowest"
            f" {cost['slowest_seconds']:.2f}), {cost['us_a_pair']:.1f} us a pair; scipy takes"
            f" {cost['scipy_float32_over_ours']:.0f} times as long in float32,"
            f" {cost['scipy_float64_over_ours']:.0f} times in float64;"
            f" largest difference {cost['largest_difference_from_scipy_float64']:.0e} rad",
            flush=True,
        )
    import scipy

    result = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "scipy": scipy.__version__,
        "grassy": grassy.__version__,
        "device": args.device if args.device == "cpu" else torch.cuda.get_device_name(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "angles": angles,
        "features": features,
    }
    save(result, args.output or Path(f"runs/bench/analysis_{args.device.split(':')[0]}.json"))


if __name__ == "__main__":
    main()
