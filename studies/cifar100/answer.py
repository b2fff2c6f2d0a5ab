"""Tables with the verdicts, and pictures, from results.jsonl, put between the marks of the pages.

    python -m studies.cifar100.answer

No verdict is written by hand: claims.py has the rule. With runs missing, it says so.
"""

import argparse
import functools
import statistics
from pathlib import Path

from benchmarks import markdown
from studies.cifar100.claims import FEWEST, NOT_YET, UNITS, Study, claims, difference, verdict
from studies.cifar100.pictures import pictures
from studies.cifar100.plan import CONTESTANTS, FIRST_CONTESTANTS, GOAL, HEADS, SETS, VARIANTS, Job, plan, read

ROOT = Path(__file__).parent.parent.parent
OWN_RESULTS = Path(__file__).parent.resolve() / "results.jsonl"
GOAL_SEEDS = 5
#: What trials differ in beside learning rate and weight decay.
SCALES = ("head.k", "head.gamma", "head.scale", "head.margin", "head_lr", "head.standardize", "head.normalize")
SCALES += ("direction",)
NAMES_OF_SETS = {"cifar10": "transfer to CIFAR-10", "flowers": "transfer to Flowers-102", "pets": "transfer to Pets"}
WORDS = {"head.standardize": "standardised", "head.normalize": "not normalised", "direction": "{}"}


table = functools.partial(markdown.table, numbers=False)


def claims_table(study: Study) -> str:
    rows = [
        [str(number), text, figures, "<br>".join(map(str, parts)), f"**{verdict(parts)}**"]
        for number, (text, figures, parts) in enumerate(claims(study), 1)
    ]
    return table(["", "claim", "the paper", "here: difference or slope, 95 % interval", "verdict"], rows)


def contests_table(study: Study) -> str:
    """Who met whom, by how much subspaces were ahead, and whether the goal was reached."""
    rows = []
    for number, (softmax, grassmann) in (("first", FIRST_CONTESTANTS), ("second", CONTESTANTS)):
        leads = [str(study.gap(grassmann, softmax, metric)) for metric in GOAL]
        rows.append([number, *leads, f"**{contest(study, softmax, grassmann)}**"])
    goals = [f"{UNITS[name]} (goal: +{value:g})" for name, value in GOAL.items()]
    return table(["contest", *goals, f"with {GOAL_SEEDS} seeds"], rows)


def leads_table(study: Study) -> str:
    """Every Grassmann head against every softmax head, as far as they are run."""
    run = [row for row in HEADS if len(study.runs[row]) >= FEWEST]
    softmax = [row for row in run if row.startswith("softmax")]

    def lead(row: str, other: str, metric: str) -> float:
        return statistics.mean(study.values(row, metric)) - statistics.mean(study.values(other, metric))

    rows = [
        [row, *("{:+.2f}, {:+.2f}".format(*(lead(row, other, metric) for metric in GOAL)) for other in softmax)]
        for row in run
        if row.startswith("grassmann")
    ]
    return table(["top-1 and transfer ahead of", *softmax], rows)


def contest(study: Study, softmax: str, grassmann: str) -> str:
    """Whether the goal is reached."""
    lost = study.lost[softmax] + study.lost[grassmann]
    if min(len(study.runs[row]) + study.lost[row] for row in (softmax, grassmann)) < GOAL_SEEDS:
        return NOT_YET
    if lost:
        return f"not reached, since runs diverged: {lost}"
    parts = {metric: study.gap(grassmann, softmax, metric).interval for metric in GOAL}
    reached = all(part and part.mean >= GOAL[name] and part.low > 0 for name, part in parts.items())
    return "reached" if reached else "not reached"


def _held_out(study: Study, trial: Job | None) -> list[str]:
    """Top-1 and mean cross-validated transfer of a trial."""
    line = study.lines.get(trial.key, {}) if trial and trial.base else {}
    if "top1" not in line:
        return ["failed" if "error" in line else NOT_YET, "–"]
    return [f"{line['top1']:.2f}", f"{statistics.mean(line['transfer_cv'].values()):.2f}"]


def trials_table(study: Study) -> str:
    """All trials of the plan that have been run."""
    rows = []
    for name, trials in study.trials.items():
        for job in (job for job in trials if job.base and job.key in study.lines):
            own = {key: job.changes[key] for key in SCALES if key in job.changes and key not in HEADS[name].changes}
            facts = [WORDS.get(key, key.removeprefix("head.") + " {}").format(value) for key, value in own.items()]
            pair = [str(job.changes["epochs"]), f"{job.changes['lr']:g}", f"{job.changes['weight_decay']:g}"]
            mark = "**" if job == study.chosen[name] else ""
            rows.append([f"{mark}{name}{mark}", *pair, ", ".join(facts) or "–", *_held_out(study, job)])
    head = [
        "",
        "epochs",
        "learning rate",
        "weight decay",
        "other settings",
        "held-out top-1",
        "cross-validated transfer",
    ]
    return table(head, rows)


def rows_table(study: Study) -> str:
    metrics = {"top1": 2, "variability": 1, "r2": 3, "effective_rank": 2, "transfer": 2, **dict.fromkeys(SETS, 2)}
    rows = [
        [row, str(len(runs)), *(study.show(row, name, digits) for name, digits in metrics.items())]
        for row, runs in study.runs.items()
        if runs
    ]
    return table(["", "seeds", "top-1", "variability, °", "R²", "effective rank", "transfer", *SETS], rows)


def settings_table(study: Study) -> str:
    """What was chosen for each row, and how one would run it by hand."""
    rows = []
    skip = ("seed", "epochs", "val_interval", "checkpoint_interval")
    for row, job in study.jobs.items():
        if not job.base:
            continue
        words = [f"{name}={str(value).lower()}" for name, value in job.changes.items() if name not in skip]
        tuned = study.chosen.get(row)
        score = f"{study.lines[tuned.key]['top1']:.2f}" if tuned else f"as {VARIANTS[row].of}"
        command = f"`grassy train {job.base} {' '.join(words)}`".replace("=start", "=WEIGHTS_OF_SOFTMAX")
        if job.changes.get("direction") == "spectral":
            command += " (before spectral steps were removed)"
        rows.append([row, score, command])
    return table(["", "held-out top-1", "command"], rows)


def summary(study: Study) -> str:
    """For the README: softmax and subspaces of the second contest, and the difference."""
    softmax, subspaces = CONTESTANTS
    names = {"top1": "top-1 accuracy", "transfer": "linear transfer, mean of three data sets", **NAMES_OF_SETS}
    rows = [
        [name, study.show(softmax, metric), study.show(subspaces, metric), _difference(study, metric)]
        for metric, name in names.items()
    ]
    return table(["CIFAR-100, ResNet-18, five seeds", "softmax", "subspaces", "difference (95 % CI)"], rows)


def _difference(study: Study, metric: str) -> str:
    softmax, subspaces = (study.values(row, metric) for row in CONTESTANTS)
    if min(len(softmax), len(subspaces)) < FEWEST:
        return NOT_YET
    mean, low, high = difference(subspaces, softmax)
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"


def about_table(study: Study) -> str:
    """Where the figures come from."""
    lines = [line for runs in study.runs.values() for line in runs]
    facts = {name: ", ".join(sorted({str(line[name]) for line in lines})) for name in ("device", "torch", "grassy")}
    days = sorted(line["started"][:10] for line in lines) or [NOT_YET]
    failed = sum("error" in line for line in study.lines.values())
    rows = [[str(len(lines)), " to ".join(dict.fromkeys([days[0], days[-1]])), *facts.values()]]
    rows[0] += [str(len(study.lines)), str(failed)]
    return table(["final runs", "days", *facts, "all jobs", "failed"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=OWN_RESULTS)
    parser.add_argument("--pages", type=Path, nargs="+", help="to write to; of other results than grassy's own, none")
    parser.add_argument("--images", type=Path, help="folder for the pictures; of other results, none")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="overrides", help="as given to run")
    args = parser.parse_args()
    if args.results.resolve() == OWN_RESULTS:
        args.pages = args.pages or [ROOT / "docs" / "results.md", ROOT / "README.md", OWN_RESULTS.parent / "tables.md"]
        args.images = args.images or ROOT / "docs" / "images"
    args.pages = args.pages or []
    if missing := next((page for page in args.pages if not page.is_file()), None):
        parser.error(f"there is no page {missing}")
    if not args.results.is_file():
        parser.error(f"there is no file of results {args.results}")
    try:
        lines = read(args.results)
        study = Study(lines, args.overrides)
        known = {job.key for job in plan(lines, args.overrides) if job.base}
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    if not known & lines.keys():
        parser.error(f"none of the {len(lines)} runs in {args.results} is of this plan: with --set, give what run had")
    blocks = {
        "about": about_table(study),
        "claims": claims_table(study),
        "contests": contests_table(study),
        "leads": leads_table(study),
        "rows": rows_table(study),
        "settings": settings_table(study),
        "trials": trials_table(study),
        "summary": summary(study),
    }
    if args.images:
        pictures(study, args.images)
    for page in args.pages:
        markdown.fill(page, blocks)
    print(*(blocks[name] for name in ("about", "claims", "contests", "leads", "rows")), sep="\n\n")
    left = sum(not job.base or job.key not in lines for job in plan(lines, args.overrides))
    print(f"\n{left} jobs are {NOT_YET}" if left else "\nall jobs are run")


if __name__ == "__main__":
    main()
