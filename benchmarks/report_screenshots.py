"""The pictures of the report page in README and docs, from the page that the demo writes.

grassy demo && python -m benchmarks.report_screenshots runs/demo/report.html
"""

import argparse
import time
from pathlib import Path

from benchmarks.browser import browser

IMAGES = Path(__file__).parents[1] / "docs" / "images"
#: For each picture: width and height of the window, the theme, and the section to show.
PICTURES = {
    "demo-light.png": (1280, 860, "light", "idea"),
    "report-light.png": (1280, 1000, "light", "overview"),
    "report-dark.png": (1280, 800, "dark", "confusions"),
    "report-phone.png": (390, 844, "light", "classes"),
}
MOST_BYTES = 300_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("page", type=Path, help="a page that grassy report or grassy demo wrote")
    parser.add_argument("--output", type=Path, default=IMAGES, help="a folder (default: docs/images)")
    args = parser.parse_args()
    with browser() as window:
        for name, (width, height, theme, section) in PICTURES.items():
            window.emulate(width, height, theme)
            window.open(args.page.absolute())
            if not window.run("return document.getElementById(arguments[0]) !== null", section):
                continue  # only the page of the demo has the idea
            window.run(
                "if (document.querySelector('main > section').id !== arguments[0])"
                "  document.getElementById(arguments[0]).scrollIntoView()",
                section,
            )
            window.wait("[...document.images].every((image) => image.complete || image.loading === 'lazy')")
            time.sleep(0.3)  # until pictures in view are painted
            window.screenshot(args.output / name)
            size = (args.output / name).stat().st_size
            if size > MOST_BYTES:
                raise RuntimeError(f"{name} has {size:,} bytes, more than {MOST_BYTES:,}")
            print(f"{name}: {size:,} bytes")


if __name__ == "__main__":
    main()
