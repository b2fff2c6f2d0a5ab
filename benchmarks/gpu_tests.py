"""Run the tests that need a GPU, in several processes, and note how many passed, of which commit.

    python -m benchmarks.gpu_tests

CI has no GPU and skips them. One or two minutes.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu import machine, need_gpu, save

#: Files, and what of them, that a process runs: of about the same length.
SHARES = (
    ("tests/kernels/test_cuda_step.py", "chosen_agrees or streamed_by_triton"),
    ("tests/kernels/test_cuda_step.py", "not chosen_agrees and not streamed_by_triton"),
    ("tests/kernels/test_cuda_calls.py", ""),
    ("tests/train/test_training_on_gpu.py", ""),
    ("tests/kernels/test_cuda_head.py", ""),
    ("tests/benchmarks/test_gpu_benchmarks.py", "on_a_gpu"),
    ("tests/data/test_images.py", "goes_to_the_device"),
    ("tests/kernels/test_large_offsets.py", ""),
)
OUTCOMES = ("passed", "failed", "error", "skipped")


def counts(output: str) -> dict[str, int]:
    """What the last line of pytest says, such as: 40 passed, 170 deselected in 30.72s."""
    last = output.strip().splitlines()[-1] if output.strip() else ""
    found = {name: re.search(rf"(\d+) {name}", last) for name in OUTCOMES}
    return {name: int(match[1]) for name, match in found.items() if match}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/gpu_tests_gpu.json"))
    args = parser.parse_args()
    need_gpu()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    running = [
        subprocess.Popen([*command, file, *(["-k", chosen] if chosen else [])], stdout=subprocess.PIPE, text=True)
        for file, chosen in SHARES
    ]
    files: dict[str, dict[str, int]] = {}
    for (file, _), process in zip(SHARES, running, strict=True):
        output, _ = process.communicate()
        found = counts(output)
        if process.returncode or not found.get("passed"):
            print(output)
        total = files.setdefault(file, {})
        for name, count in found.items():
            total[name] = total.get(name, 0) + count
    save({**machine(), "files": files}, args.output)
    print(f"{files}; saved {args.output}")
    sys.exit(any(process.returncode for process in running))


if __name__ == "__main__":
    main()
