"""What a reader does with the page, and sees of it."""

import json

HOSTILE = "<img src=x onerror=alert(1)>"
NAMES = ["cat", HOSTILE, "dog", "snowy owl", "newt"]


def picture(window):
    return window.run("return document.getElementById('angles-matrix').toDataURL()")


def set_value(window, control, value):
    """Set a control as a user would, who makes it tell the page, and wait for the picture."""
    before = picture(window)
    script = """
        const control = document.getElementById(arguments[0]);
        control.value = arguments[1];
        control.dispatchEvent(new Event(control.type === "range" ? "input" : "change"));
    """
    window.run(script, control, value)
    window.wait(f"document.getElementById('angles-matrix').toDataURL() !== {json.dumps(before)}")


def click_on_pair(window, row, column, order, matrix="angles-matrix"):
    """Click the cell where two classes meet, as far as an eye can find it: by the axes of the picture."""
    box = window.run(
        "const canvas = document.getElementById(arguments[0]); canvas.scrollIntoView({ block: 'center' });"
        "const b = canvas.getBoundingClientRect(); return [b.left, b.top, b.width]",
        matrix,
    )
    margin = min(box[2] * 0.22, 16 + min(16, max(map(len, NAMES))) * 7)
    cell = (box[2] - margin) / len(order)
    x, y = (margin + (order.index(c) + 0.5) * cell for c in (column, row))
    window.click_at(box[0] + x, box[1] + y)


def shown_angles(window, part=0):
    script = """
        const bars = document.querySelectorAll(".pair-angles")[arguments[0]];
        return [...bars.querySelectorAll(".value")].map((value) => value.textContent);
    """
    return [float(text.rstrip("°")) for text in window.run(script, part)]


def analysis_of(run):
    return json.loads((run / "analysis.json").read_text())


def table(window):
    """The rows of the table of classes that are shown, from top to bottom, cell by cell."""
    return window.run(
        "return [...document.querySelectorAll('#class-table tbody tr')].filter((row) => !row.hidden)"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
