"""How large the report page is, and how fast it answers: `python -m benchmarks.report_page`.

Made of a head with random subspaces, features around them with some confusion, and painted images, so that it needs no
data. The page is opened in headless Chromium: what is timed is what a reader waits for, until the browser has laid out
the answer.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter

import grassy
from benchmarks.browser import Browser, browser
from grassy.report.analyze import name_examples
from grassy.report.classes import describe
from grassy.report.page import PageRun, write_page
from grassy.report.thumbnails import thumbnails
from grassy.runs.records import environment

RESULTS = Path(__file__).parent / "results" / "report_page.json"
TIMES = 5


class Painted:
    """Blurred noise in place of photographs: about as hard to compress."""

    def __init__(self, classes: int, each: int) -> None:
        self.class_names = [f"n{1000 + i:08d} a synset of words" for i in range(classes)]
        self._labels = np.repeat(np.arange(classes), each)

    def __len__(self) -> int:
        return len(self._labels)

    def load(self, index: int) -> tuple[Any, int]:
        noise = np.random.default_rng(index).integers(0, 255, (24, 24, 3), dtype=np.uint8)
        photo = Image.fromarray(noise).resize((160, 120), Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(2))
        return np.asarray(photo), int(self._labels[index])

    def name(self, index: int) -> str:
        return f"val/{self.class_names[self._labels[index]].split()[0]}/photo_{index:08d}.JPEG"

    def labels(self) -> np.ndarray:
        return self._labels


def make_run(classes: int, each: int, k: int, width: int = 256) -> PageRun:
    torch.manual_seed(0)
    head = grassy.GrassmannHead(width, classes, k=k)
    images = Painted(classes, each)
    labels = torch.from_numpy(images.labels())
    inside = torch.randn(len(labels), 1, k) @ head.weight.detach()[labels]
    features = inside.squeeze(1) + 0.42 * torch.randn(len(labels), width)
    analysis = describe(head, images.class_names, features, labels)
    name_examples(analysis, images, [], labels)
    analysis["per_class"]["training_images"] = [1300 - i % 100 for i in range(classes)]
    facts = {"model": "noise", "head": {"name": "grassmann"}, "data": {"images": len(labels), "split": "validation"}}
    curves: dict[str, list[float | None]] = {
        "epoch": [*map(float, range(100))],
        "train_loss": [7 / (e + 1) for e in range(100)],
    }
    return PageRun("noise", {**facts, **analysis}, curves, thumbnails(images, analysis["examples"]))


#: What a reader does: a name, and JavaScript that does it for the n-th time.
ACTIONS = {
    "sort_the_table": "document.querySelectorAll('#class-table thead button')[n % 5].click()",
    "filter_by_a_text": """
        const field = document.getElementById('search');
        field.value = String(n + 3);
        field.dispatchEvent(new Event('input'));
    """,
    "open_a_class": "document.querySelectorAll('#class-table tbody button')[7 * n].click()",
    "choose_a_confusion": "document.querySelectorAll('#confusion-list button')[n].click()",
    "choose_another_angle": """
        const slider = document.getElementById('angle');
        slider.value = n + 2;
        slider.dispatchEvent(new Event('input'));
    """,
}

#: Layout is asked for at the end, so that it is part of the time.
TIMED = """
    const n = arguments[0], start = performance.now();
    {action};
    document.body.offsetHeight;
    return performance.now() - start;
"""

SCROLL = """
    const done = arguments[0], frames = [], height = document.documentElement.scrollHeight;
    let last = performance.now(), at = 0;
    const step = (now) => {
      frames.push(now - last);
      last = now;
      at += 60;
      window.scrollTo(0, at);
      if (at < height) requestAnimationFrame(step);
      else {
        frames.sort((a, b) => a - b);
        done([frames[frames.length >> 1], frames[Math.floor(frames.length * 0.99)], frames.length]);
      }
    };
    requestAnimationFrame(step);
"""


def measure_page(window: Browser, page: Path) -> dict[str, Any]:
    opened: list[list[float]] = []
    for _ in range(TIMES):
        window.open(page)
        opened.append(
            window.run("const { readable, drawn } = document.documentElement.dataset; return [+readable, +drawn]")
        )
    middle = [sorted(times)[TIMES // 2] for times in zip(*opened, strict=True)]
    result: dict[str, Any] = {"readable_ms": middle[0], "all_drawn_ms": middle[1]}
    for name, action in ACTIONS.items():
        script = TIMED.replace("{action}", action)
        times = sorted(window.run(script, n) for n in range(TIMES))
        result[f"{name}_ms"] = round(times[TIMES // 2], 1)
    median, worst, frames = window.run_async(SCROLL)
    result |= {
        "scroll_frame_ms": round(median, 1),
        "scroll_slowest_percent_ms": round(worst, 1),
        "scroll_frames": frames,
    }
    result["heap_mb"] = round(window.run("return performance.memory.usedJSHeapSize") / 1e6, 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--images", type=int, default=50, help="of each class")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    run = make_run(args.classes, args.images, args.k)
    with tempfile.TemporaryDirectory() as folder, browser() as window:
        start = time.perf_counter()
        page = write_page([run], Path(folder) / "report.html")
        written = time.perf_counter() - start
        result = {
            "classes": args.classes,
            "images": args.classes * args.images,
            "k": args.k,
            "top1": run.analysis["scalars"]["top1"],
            "page_mb": round(page.stat().st_size / 1e6, 2),
            "pictures": sum(uri is not None for uri in run.pictures),
            "examples": len(run.pictures),
            "write_s": round(written, 2),
        }
        for name, (width, height) in {"desktop": (1280, 900), "phone": (390, 844)}.items():
            window.emulate(width, height)
            result[name] = measure_page(window, page)
            if errors := window.errors():
                raise RuntimeError(f"the page has errors: {errors}")
        version = window.run("return navigator.userAgent")
    machine = {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1), "browser": version}
    result = {"environment": {**environment(torch.device("cpu")), **machine}, **result}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
