"""The tables and the verdict of the study of Tiny-ImageNet, from made-up results."""

import json

import pytest
from studies.cifar100.claims import NOT_YET
from studies.tiny_imagenet import answer, plan
from studies.tiny_imagenet.plan import FINAL, LINEAR_PROBES, OTHER_PROBES

PROBES = (*LINEAR_PROBES, *OTHER_PROBES)


def by_probe(entry, value):
    return {probe: dict.fromkeys(plan.SETS[entry.data], value) for probe in PROBES}


def line_of(entry, top1, transfer):
    """All that a run leaves; seeds differ a little."""
    wobble = 0.01 * (entry.recipe.seed % 5)
    facts = {"key": entry.key, "stage": entry.stage, "row": entry.row, "name": entry.name, "seed": entry.recipe.seed}
    facts |= {"settings": entry.settings, "torch": "2", "device": "none", "commit": "abc", "seconds": 1.0}
    line = {**facts, "top1": top1 + wobble, "transfer_cv": by_probe(entry, transfer + wobble)}
    line |= {"transfer_chosen": by_probe(entry, 1.0), "transfer_at_end": by_probe(entry, False)}
    if entry.split is None:
        line["transfer"] = by_probe(entry, transfer + wobble)
    if entry.stage in (FINAL, plan.GENERALISE_FINAL):
        scores = {kind: {"auroc": 80.0, "fpr95": 60.0} for kind in ("energy", "outlier_score")}
        line["users"] = {
            **{name: {"flowers": 40.0} for name in ("recall_at_1", "1_shot", "5_shot")},
            "outliers": {"flowers": scores, "cifar10": scores},
            "calibration": dict.fromkeys(("temperature", "ece", "loss", "ece_scaled", "loss_scaled"), 1.0),
            "pruning": {"top1": 50.0, "k": 32.0, "top1 at 0.01": 49.9, "k at 0.01": 5.0}
            | {"largest change of a logit at 0.01": 0.1},
        }
    if entry.data == plan.SUPERCLASSES:
        line["fine_classes"] = {part: dict.fromkeys(LINEAR_PROBES, 30.0) for part in ("inside", "residual")}
    return line


@pytest.fixture(scope="module")
def results():
    """Lines of all runs, subspaces ahead by 0.7 points of top-1 and 4 of transfer."""
    lines = {}
    while waiting := [entry for entry in plan.plan(lines) if entry.base and entry.key not in lines]:
        for entry in waiting:
            ahead = "subspaces" in entry.row or entry.row in plan.OPEN_TRIALS or "grassmann" in entry.row
            best = 0.3 if entry.number == 2 and entry.stage == plan.TRIALS else 0.0
            if entry.stage == plan.GAMMA:
                best = {1: -1.0, 2: 0.5, 3: 0.0, 4: -1.0}[entry.number] * (1 if "20 classes" not in entry.row else -1)
            lines[entry.key] = line_of(entry, (57.7 if ahead else 57.0) + best, 68.0 if ahead else 64.0)
    return lines


def changed(results, row, change):
    """The results with something changed in every final run of a row."""
    lines = {key: json.loads(json.dumps(line)) for key, line in results.items()}
    for line in lines.values():
        if line["stage"] == FINAL and line["row"].startswith(row):  # rows with the same settings share their runs
            change(line)
    return answer.Study(lines)


def test_the_verdict_follows_the_rule(results):
    assert answer.verdict(answer.Study(results)).startswith("**reached**")

    def less_transfer(line):
        line["transfer"]["svm-standardised"] = dict.fromkeys(plan.SETS[plan.TINY], 65.0 + line["seed"] % 5 / 100)

    said = answer.verdict(changed(results, "subspaces", less_transfer))
    assert said.startswith("**holds in direction**, but the lead in transfer by svm-standardised is smaller")

    def no_lead(line):
        line["transfer"]["svm"] = dict.fromkeys(plan.SETS[plan.TINY], 64.0 + line["seed"] % 5 / 100)

    said = answer.verdict(changed(results, "subspaces", no_lead))
    assert said.startswith("**not shown**, since the interval of transfer by svm is not above zero")
    four_seeds = {key: line for key, line in results.items() if (line["stage"], line["seed"]) != (FINAL, 304)}
    assert answer.verdict(answer.Study(four_seeds)).startswith(f"**{NOT_YET}**")


def test_the_page_has_all_tables_and_a_figure(results, tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in results.values()))
    answer.main(["--results", str(file), "--page", str(tmp_path / "tables.md"), "--figure", str(tmp_path / "f.png")])
    text = (tmp_path / "tables.md").read_text()
    assert NOT_YET not in text
    assert "| subspaces - softmax | +0.70 [" in text
    assert "| transfer by svm | 64.02 ± 0.01 | 68.02 ± 0.01 | +4.00 [" in text  # of the audit
    assert "| subspaces, trial 2 | 58.00 at 68.00 | softmax | none has as much |" in text
    assert "| softmax, trial 2 | 57.30 at 64.00 | subspaces | 58.00 at 68.00 |" in text
    assert "| 0.01 | 5.00 ± 0.00 | 49.90 ± 0.00 |" in text
    assert "Best on average: 0.8, ahead of 1 in 4 of 6 cases: the rule stays." in text
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_without_results_everything_is_not_yet_run(tmp_path):
    file = tmp_path / "results.jsonl"
    answer.main(["--results", str(file), "--page", str(tmp_path / "tables.md"), "--figure", str(tmp_path / "f.png")])
    text = (tmp_path / "tables.md").read_text()
    assert f"**{NOT_YET}**" in text
    assert "36 of 36 runs are not yet run." in text
    assert not (tmp_path / "f.png").exists()
