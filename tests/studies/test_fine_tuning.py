"""The study of fine-tuning, small: its plan, its draws, one run of each kind, and its verdict."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from studies.fine_tuning import answer, run
from studies.fine_tuning.run import DRAWS, PRETRAINED, RATES, SETS, Entry

from grassy.models import import_timm
from training_cases import tiny_arrays

MEASURES = dict.fromkeys(answer.MEASURES, 50.0)


def made_up(entry, **more):
    """A line of results as a run would leave it."""
    facts = {"name": entry.name, "data": entry.data, "arm": entry.arm, "draw": entry.draw, "lr": entry.lr}
    scores = {where: {"energy": {"auroc": 60.0}} for where in ("near", "far")}
    calibration = dict.fromkeys(("ece", "ece_scaled", "loss", "loss_scaled"), 1.0)
    versions = {"torch": "2", "timm": "1", "commit": "abc", "seconds": 2.0}
    return {**facts, **MEASURES, "outliers": scores, "calibration": calibration, **versions, **more}


def all_lines(**of_subspaces):
    """Lines of the whole plan; `of_subspaces` maps a measure to the lead of the subspaces in each draw."""
    lines = {}
    while rest := [entry for entry in run.to_do(lines) if entry.lr is not None]:
        for entry in rest:
            best = 51.0 if entry.lr == 3e-4 else 50.0
            more = {"top1": best} if entry.is_trial else {}
            if entry.arm == "subspaces" and not entry.is_trial:
                more = {name: 50 + leads[entry.draw - 1] for name, leads in of_subspaces.items()}
            lines[entry.name] = made_up(entry, **more)
    return lines


def test_trials_come_first_and_choose_the_rate_of_the_final_runs():
    first = [entry for entry in run.plan({}) if entry.data == "pets64"]
    assert [entry.arm for entry in first[:8]] == ["softmax"] * 4 + ["subspaces"] * 4
    assert all(entry.lr is None for entry in first if not entry.is_trial and entry.arm != PRETRAINED)
    lines = all_lines()
    assert len(lines) == len({entry.name for entry in run.plan(lines)}) == 2 * (4 * len(RATES) + 5 * len(DRAWS))
    assert run.chosen(lines, "pets64", "softmax") == 3e-4
    assert not run.to_do(lines)


def test_a_draw_divides_the_classes_and_is_the_same_again():
    y = np.repeat(np.arange(7), 3)
    arrays = {part: (np.arange(21, dtype=np.uint8)[:, None, None, None], y) for part in ("train", "test")}
    seen, unseen = run.halves(arrays, 1)
    assert [len(np.unique(half["train"][1])) for half in (seen, unseen)] == [3, 4]
    images = np.concatenate([half["test"][0].ravel() for half in (seen, unseen)])
    assert sorted(images) == list(range(21))
    assert np.array_equal(run.halves(arrays, 1)[0]["train"][0], seen["train"][0])
    assert any(not np.array_equal(run.halves(arrays, draw)[0]["train"][0], seen["train"][0]) for draw in (2, 3))
    parts = run.hold_out(*seen["train"])
    assert sorted(np.concatenate([parts[part][0].ravel() for part in ("train", "test")])) == sorted(
        seen["train"][0].ravel()
    )


@pytest.mark.parametrize(
    ("leads", "words"),
    [
        ((2.0, 2.1, 1.9, 2.0, 2.2), "subspaces keep more"),
        ((-2.0, -2.1, -1.9, -2.0, -2.2), "softmax keeps more"),
        ((2.0, -2.0, 1.0, -1.0, 0.5), "undecided"),
    ],
)
def test_the_verdict_follows_the_rule(leads, words):
    lines = all_lines(**dict.fromkeys(answer.DECISIVE, leads))
    assert words in answer.verdict(lines, "pets64")
    one_less = {name: line for name, line in lines.items() if (line["arm"], line["draw"]) != ("softmax", 5)}
    assert "not yet run" in answer.verdict(one_less, "pets64")
    mixed = all_lines(**dict.fromkeys(answer.DECISIVE[:2], leads), recall_at_1=(1.0, -1.0, 0.5, -0.5, 0.0))
    assert "undecided" in answer.verdict(mixed, "pets64")
    assert "50.0 (5)" in answer.page(lines)


def test_the_page_tells_the_results_in_the_repository():
    lines = run.read(run.HERE / "results.jsonl")
    assert (run.HERE / "tables.md").read_text() == answer.page(lines)


@pytest.mark.slow
def test_each_kind_of_run_leaves_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "MODEL", "test_resnet")
    monkeypatch.setattr(run, "SIZE", 32)
    monkeypatch.setattr(run, "SETS", {name: (known, 1) for name, (known, _) in SETS.items()})
    for name in SETS:
        tiny_arrays(tmp_path / "data" / name, images=120, classes=6, size=12)
    torch.manual_seed(0)
    weights = tmp_path / "weights.safetensors"
    save_file(import_timm().create_model("test_resnet").state_dict(), weights)
    images = run.Images(tmp_path / "data")
    for entry in (
        Entry("pets64", PRETRAINED, 1, 0.0),
        *(Entry("pets64", arm, 1, 1e-3) for arm in answer.ARMS),
        Entry("pets64", "softmax", 0, 1e-3),
    ):
        line = run.do(entry, images, weights, tmp_path / "scratch", ["batch_size=16"])
        assert line["classes"] == 3
        assert ("top1" in line) == (entry.arm != PRETRAINED)
        assert ("recall_at_1" in line) != entry.is_trial
    assert not (tmp_path / "scratch" / "run").exists()
