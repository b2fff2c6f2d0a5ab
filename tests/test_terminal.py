"""Progress where nobody looks at a terminal."""

from grassy import terminal


def test_a_log_gets_a_line_per_minute(capsys, monkeypatch):
    clock = iter(range(0, 1000, 25))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    with terminal.bar("Packing", 4000) as advance:
        for _ in range(4):
            advance(1000)
    assert capsys.readouterr().err == "Packing: 3,000 of 4,000\n"
    with terminal.bar("Packing", 4000, shown=False) as advance:
        advance(4000)
    assert capsys.readouterr().err == ""
