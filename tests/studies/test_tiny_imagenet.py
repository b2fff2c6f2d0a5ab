"""The study of Tiny-ImageNet, small: its plan, its queue, what it measures and how it chooses."""

import functools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from studies.tiny_imagenet import data, heads, plan, probes, run
from studies.tiny_imagenet.mixing import DeviceMixing
from studies.tiny_imagenet.plan import ARMS, PARTS, TRIALS, read

from grassy import make_optimizer
from grassy.heads import create_head, heads_of
from grassy.models import create_model
from grassy.runs.recipe_changes import with_changes
from training_cases import tiny_arrays

TINY = ["model_kwargs={channels: [4, 4, 8, 64]}", "img_size=8", "batch_size=16", "epochs=1", "warmup_epochs=0"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, size in (("tiny32", 8), ("cifar100", 8), ("cifar10", 8), ("flowers", 8), ("pets64", 12)):
        tiny_arrays(folder / name, images=60, classes=3, size=size)
    return folder


def made_up(entry, top1=50.0, transfer=60.0, **more):
    """A line of results as a run would leave it."""
    cv = {probe: dict.fromkeys(plan.SETS[entry.data], transfer) for probe in (*plan.LINEAR_PROBES, "knn")}
    facts = {"key": entry.key, "stage": entry.stage, "row": entry.row, "name": entry.name, "device": "none"}
    return {**facts, "top1": top1, "transfer_cv": cv, "seconds": 1.0, **more}


def lines_of(entries, **more):
    return {entry.key: made_up(entry, **more) for entry in entries}


# ------------------------------------------------------------------------------------------------ the plan


@pytest.mark.slow
def test_every_entry_is_a_recipe_and_every_part_has_its_runs():
    lines = {}
    while waiting := [entry for entry in plan.plan(lines) if entry.base and entry.key not in lines]:
        lines |= lines_of(waiting)
    entries = plan.plan(lines)
    assert all(entry.recipe.epochs == 60 for entry in entries)
    assert len({entry.name for entry in entries}) == len(entries)
    counts = Counter(entry.stage for entry in entries)
    assert set(counts) == set(PARTS)
    assert counts["audit"] == 2 * 5
    assert counts["splits"] == len(ARMS) * 3 * 2
    assert counts["final"] == 8 * 5
    of_arms = Counter(entry.row for entry in entries if entry.stage == TRIALS)
    assert of_arms == {"softmax": 12, "subspaces": 12, "cosine": 6, "signed": 6}
    assert len({entry.key for entry in entries if entry.stage == TRIALS}) == 36
    for entry in entries:
        head = create_head(in_features=512, num_classes=200, **entry.recipe.head)
        assert head(torch.randn(2, 512)).shape == (2, 200)


def test_the_audit_has_the_settings_and_seeds_of_the_cifar100_study():
    before = [json.loads(line) for line in plan.CIFAR100_RESULTS.read_text().splitlines()]
    before = {(line["row"], line["seed"]): line["settings"] for line in before if line["stage"] == "final"}
    entries = plan.audit({})
    assert {entry.number for entry in entries} == set(range(200, 205))
    for entry in entries:
        assert entry.settings == before[entry.row, entry.number]


def test_the_readme_lists_the_trials_of_the_plan():
    text = (Path(plan.__file__).parent / "README.md").read_text()
    assert text.split("<!-- trials -->\n")[1].split("\n<!-- /trials -->")[0] == plan.listing()


def test_splits_are_disjoint_and_have_the_same_share_of_every_class():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(7), 50))
    held_out = []
    for number in range(plan.NUMBER_OF_SPLITS):
        kept, out = data.split(labels, number)
        assert sorted([*kept, *out]) == list(range(350))
        assert set(np.bincount(labels[out])) == {5}
        held_out += [*out]
    assert len(set(held_out)) == len(held_out)


# ------------------------------------------------------------------------------------------------ the choice


def test_the_score_weighs_both_in_units_of_the_goal():
    entry = plan.trials({})["softmax"][0]
    base = plan.score(made_up(entry, 50.0, 60.0))
    assert plan.score(made_up(entry, 50.5, 60.0)) - base == pytest.approx(1)
    assert plan.score(made_up(entry, 50.0, 63.0)) - base == pytest.approx(1)
    one_probe = made_up(entry, 50.0, 60.0)
    one_probe["transfer_cv"]["svm"] = dict.fromkeys(plan.SETS[plan.TINY], 66.0)
    assert plan.score(one_probe) - base == pytest.approx(1)  # half of six points, by one of two probes
    one_probe["transfer_cv"]["knn"] = dict.fromkeys(plan.SETS[plan.TINY], 0.0)
    assert plan.score(one_probe) - base == pytest.approx(1)


def test_the_best_three_run_again_and_the_best_mean_is_chosen():
    trials = plan.trials({})["subspaces"]
    lines = lines_of(trials)
    for number, top1 in ((3, 52.0), (5, 51.0), (7, 50.5)):
        lines[trials[number - 1].key] = made_up(trials[number - 1], top1)
    del lines[trials[0].key]
    assert not any(entry.base for entry in plan.reruns("subspaces", trials, lines, {}))  # one is not made yet
    lines[trials[0].key] = made_up(trials[0], error="TrainingStopped", diverged=True)
    again = plan.reruns("subspaces", trials, lines, {})
    assert [(entry.number, entry.split) for entry in again] == [(3, 1), (5, 1), (7, 1), (3, 2), (5, 2), (7, 2)]
    assert plan.chosen(trials, again, lines) is None
    lines |= lines_of(again, top1=50.0)
    assert plan.chosen(trials, again, lines).number == 3
    for entry in again[1::3]:
        lines[entry.key] = made_up(entry, top1=51.0)
    assert plan.chosen(trials, again, lines).number == 5  # 51 each, against 52, 50 and 50
    lines[again[1].key] = made_up(again[1], error="TrainingStopped", diverged=True)
    assert plan.chosen(trials, again, lines).number == 3


def test_final_rows_by_top1_alone_and_by_transfer_alone():
    trials = plan.trials({})
    lines = lines_of(entry for arm in ARMS for entry in trials[arm])
    by_top1, by_transfer, by_both = trials["softmax"][1], trials["softmax"][2], trials["softmax"][3]
    lines[by_top1.key] = made_up(by_top1, 51.0, 50.0)
    lines[by_transfer.key] = made_up(by_transfer, 40.0, 70.0)
    lines[by_both.key] = made_up(by_both, 50.9, 69.0)
    found = plan.sources(lines, {})
    assert found["softmax, best top1"] == by_top1
    assert found["softmax, best transfer"] == by_transfer
    assert found["softmax"] is None
    lines |= lines_of(entry for arm in ARMS for entry in plan.reruns(arm, trials[arm], lines, {}))
    assert plan.sources(lines, {})["softmax"] == by_both
    final = plan.final(lines, {})
    assert [entry.row for entry in final[:5]] == [*ARMS, "softmax"]
    assert {entry.recipe.seed for entry in final} == set(range(300, 305))
    assert all(entry.split is None for entry in final)


# ------------------------------------------------------------------------------------------------ the queue


def queue(images, tmp_path, *words):
    where = ["--data", images, "--output", tmp_path / "results.jsonl", "--scratch", tmp_path / "scratch"]
    run.main([*map(str, where), "--commit", "abc", *words, "--set", *TINY])
    return list(read(tmp_path / "results.jsonl").values())


@pytest.mark.slow
def test_the_queue_resumes_and_runs_nothing_twice(images, tmp_path, monkeypatch, capsys):
    begun = []

    def do(entry, store, place):
        begun.append(entry.name)
        if len(begun) == 4:
            raise KeyboardInterrupt
        if len(begun) == 2:
            return made_up(entry) | {"error": "RuntimeError: no luck", "diverged": False}
        return made_up(entry)

    monkeypatch.setattr(run, "do", do)
    with pytest.raises(KeyboardInterrupt):
        queue(images, tmp_path, "--part", "trials")
    results = tmp_path / "results.jsonl"
    assert len(results.read_text().splitlines()) == 3  # one of them failed, and the queue went on
    with results.open("a") as file:
        file.write('{"key": "cut sh')  # killed while writing
    lines = queue(images, tmp_path, "--part", "trials", "splits")
    repeated = begun[3]
    assert Counter(begun) == Counter({entry.name: 1 for entry in plan.plan({}) if entry.stage == TRIALS} | {repeated: 2}
                                     | {name: 1 for name in begun if name.startswith("splits/")})  # fmt: skip
    # The trials of subspaces lack one that failed, so that their splits wait.
    assert {line["row"] for line in lines if line["stage"] == "splits"} == {"softmax", "cosine", "signed"}
    before = len(begun)
    queue(images, tmp_path, "--part", "trials", "splits")
    assert len(begun) == before
    queue(images, tmp_path, "--part", "trials", "splits", "--retry")
    assert begun[before] == begun[1]
    assert len(begun) == before + 1 + 6  # the failed trial, and then the splits that waited for it
    run.main(["--part", "all", "--list", "--output", str(results), "--set", *TINY])
    said = capsys.readouterr().out
    assert "trials: 36 runs, 0 remain" in said
    assert "final: 40 runs, 20 remain" in said  # rows with the same settings share their runs


def test_processes_that_share_the_queue_run_each_entry_once(images, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(run, "do", lambda entry, *_: begun.append(entry.name) or made_up(entry))
    queue(images, tmp_path, "--part", "trials", "--share", "2/2")
    half = len(begun)
    assert half == 18
    queue(images, tmp_path, "--part", "trials", "--share", "1/2")
    assert len(begun) == len(set(begun)) == 36
    with pytest.raises(SystemExit):
        queue(images, tmp_path, "--share", "3/2")


def test_nothing_begins_that_would_not_end_in_time(images, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "do", lambda entry, *_: pytest.fail(f"{entry.name} was begun"))
    assert queue(images, tmp_path, "--part", "audit", "--minutes", "0.1") == []


def test_the_queue_stops_when_everything_fails(images, tmp_path, monkeypatch):
    failed = {"error": "RuntimeError: the GPU is lost", "diverged": False}
    monkeypatch.setattr(run, "do", lambda entry, *_: made_up(entry) | failed)
    with pytest.raises(SystemExit, match="5 failures in a row: RuntimeError: the GPU is lost"):
        queue(images, tmp_path, "--part", "trials")
    assert len(read(tmp_path / "results.jsonl")) == 5


def test_missing_data_is_named_before_anything_runs(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run.main(["--data", str(tmp_path), "--part", "trials", "--output", str(tmp_path / "r.jsonl"), "--set", *TINY])
    said = capsys.readouterr().err
    assert "tiny32" in said
    assert "flowers" in said


# ------------------------------------------------------------------------------------------------ a run


@pytest.mark.slow
def test_runs_of_all_arms_leave_what_the_page_needs(images, tmp_path, monkeypatch):
    def first(lines, overrides):
        found = plan.trials(overrides)
        return [found["softmax"][5], found["subspaces"][1], found["cosine"][1], found["signed"][1]]

    monkeypatch.setattr(run, "plan", first)
    monkeypatch.setattr(probes, "CS", ((0.1, 1.0, 10.0),))
    lines = queue(images, tmp_path)
    assert [line.get("error") for line in lines] == [None] * 4
    for line in lines:
        assert line["commit"] == "abc"
        assert line["torch"] == torch.__version__
        assert (line["seed"], line["split"], line["data"]) == (0, 0, "tiny32")
        assert (line["images_train"], line["images_test"]) == (54, 6)  # of 60, and no test image among them
        assert {*line} >= {"settings", "top1", "loss", "train_loss", "seconds", "device", "r2_test", "transfer_chosen"}
        assert "transfer" not in line  # test images only when nothing is left to choose
        assert set(line["transfer_cv"]) == {"svm", "svm-standardised", "knn"}
        assert all(set(sets) == {"cifar10", "cifar100", "flowers", "pets"} for sets in line["transfer_cv"].values())
    assert all(line["orthonormality_error"] < 1e-5 for line in lines if line["row"] in ("subspaces", "signed"))
    assert not list((tmp_path / "scratch" / "runs").iterdir())  # numbers stay, weights do not


def test_a_final_run_is_measured_on_test_images_by_all_probes(images, tmp_path, monkeypatch):
    def first(lines, overrides):
        return plan.audit(overrides)[:1]

    monkeypatch.setattr(run, "plan", first)
    monkeypatch.setattr(probes, "CS", ((0.1, 1.0, 10.0),))
    (line,) = queue(images, tmp_path)
    assert "error" not in line
    assert set(line["transfer"]) == {"svm", "svm-standardised", "knn", "logistic"}
    assert all(set(sets) == {"cifar10", "flowers", "pets"} for sets in line["transfer"].values())


@pytest.mark.parametrize("part", ["final", "coarse"])
def test_runs_of_these_parts_leave_what_users_get(images, tmp_path, monkeypatch, part):
    def some(lines, overrides):
        if part == "coarse":
            return plan.coarse(overrides)[1:2]
        (trial, *_) = plan.trials(overrides)["subspaces"]
        return [plan._entry("final", "subspaces", 300, trial.changes | {"seed": 300}, 300, None, overrides)]

    monkeypatch.setattr(run, "plan", some)
    monkeypatch.setattr(probes, "CS", ((0.1, 1.0, 10.0),))
    (line,) = queue(images, tmp_path)
    assert line.get("error") is None
    if part == "coarse":
        assert {name: set(sets) for name, sets in line["fine_classes"].items()} == {
            "inside": {"svm", "svm-standardised"},
            "residual": {"svm", "svm-standardised"},
        }
        return
    assert set(line["users"]) == {"recall_at_1", "1_shot", "5_shot", "outliers", "calibration", "pruning"}
    assert set(line["users"]["outliers"]["flowers"]) == {"max-softmax", "max-logit", "energy", "outlier_score"}
    assert set(line["transfer"]) == {"svm", "svm-standardised", "knn", "logistic"}


# ------------------------------------------------------------------------------------------------ heads and probes


def test_the_decay_of_a_classifier_is_its_own():
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), create_head(heads.SOFTMAX, 5, 3, decay=0.0, beta=0.5))
    optimizer = make_optimizer(model, "sgd", lr=0.1, weight_decay=0.5, decay_all=True, momentum=0.9)
    optimizer = heads.set_classifier_decay(optimizer, model)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {id(p): 0.5 for p in model[0].parameters()} | {id(p): 0.0 for p in model[1].parameters()}
    before = model[1].weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    norm = model[0].weight.norm()
    optimizer.step()
    torch.testing.assert_close(model[1].weight.detach(), before)
    assert model[0].weight.norm() < 0.96 * norm


def test_temperature_multiplies_logits():
    x = torch.randn(4, 5)
    torch.manual_seed(0)
    one = create_head(heads.SOFTMAX, 5, 3)
    torch.manual_seed(0)
    other = create_head(heads.SOFTMAX, 5, 3, beta=0.3)
    torch.testing.assert_close(other(x), 0.3 * one(x))


def test_signed_vectors_are_subspaces_of_dimension_one_with_a_sign():
    head = create_head(heads.SIGNED, 8, 3, gamma=2.0).eval()
    x = torch.randn(5, 8)
    subspaces = create_head("grassmann", 8, 3, k=1, gamma=2.0, normalize=False, standardize=True).eval()
    subspaces.weight.data.copy_(head.weight.data)  # of the same batch statistics, which are those of the beginning
    torch.testing.assert_close(head(x).abs(), subspaces(x))
    torch.testing.assert_close(head(-x), -head(x))
    optimizer = make_optimizer(head, "sgd", lr=0.1)
    head.train()
    torch.nn.functional.cross_entropy(head(x), torch.tensor([0, 1, 2, 0, 1])).backward()
    optimizer.step()
    torch.testing.assert_close(head.weight.norm(dim=-1), torch.ones(3, 1))


def test_mean_plus_subspace_contains_softmax_and_subspaces():
    head = create_head(heads.MEAN, 8, 3, k=2, gamma=1.5, normalize=False, beta=0.7)
    x = torch.randn(5, 8)
    subspaces = create_head("grassmann", 8, 3, k=2, gamma=1.5, normalize=False)
    with torch.no_grad():
        subspaces.weight.copy_(head.weight)
        head.bias.normal_()
        softmax = 0.7 * x @ head.mean.mT + head.bias
        for c, m in enumerate(torch.nn.functional.normalize(head.mean)):
            without_mean = x - (x @ m)[:, None] * m
            torch.testing.assert_close(head(x)[:, c], softmax[:, c] + subspaces(without_mean)[:, c])
        head.gamma = 0.0
        torch.testing.assert_close(head(x), softmax)
        head.gamma = 1.5
        head.mean.zero_()
        torch.testing.assert_close(head(x), subspaces(x) + head.bias)


@pytest.mark.parametrize("option", ["used", "contrast"])
def test_a_reward_for_variety_leaves_the_own_logit_alone(option):
    head = create_head(heads.VARIETY, 8, 3, k=3, normalize=False, gamma=1.0, **{option: 1.0}).train()
    target = torch.tensor([0, 0, 1, 1, 0, 0])
    criterion = torch.nn.CrossEntropyLoss()
    for _ in range(3):
        head.loss(torch.randn(6, 8), target, criterion)
    x = torch.randn(6, 8, requires_grad=True)
    extra = head.loss(x, target, criterion) - criterion(head.logits(x), target)
    (direction,) = torch.autograd.grad(extra, x)
    assert direction.norm() > 1e-3
    x2 = x.detach().clone().requires_grad_()
    own = head.logits(x2)[range(6), target]
    (up,) = torch.autograd.grad(own.sum(), x2)
    torch.testing.assert_close((up * direction).sum(-1), torch.zeros(6), atol=1e-5, rtol=0)


def test_the_standardised_svm_does_not_depend_on_the_scale_of_features():
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    x = torch.randn(90, 6, generator=rng) + labels[:, None] * torch.tensor([1.0, 0, 0, 0, 0, 0])
    factors = torch.tensor([1e-3, 1, 10, 100, 1, 1])
    one, other = (probes.probe("svm-standardised", each, labels, "top1") for each in (x, x * factors + 5))
    assert one.cv == pytest.approx(other.cv, abs=1.2)
    assert one.chosen == other.chosen
    paper = [probes.probe("svm", each, labels, "top1").cv for each in (x, x * factors + 5)]
    assert abs(paper[0] - paper[1]) > 5
    with_constant = torch.cat([x, torch.full((90, 1), 3.0)], 1)
    assert probes.standardise(with_constant)[0].isfinite().all()


@pytest.mark.parametrize(
    ("peak", "chosen", "pieces"), [(1e-5, 1e-3, 1), (0.1, 0.1, 1), (10, 10, 2), (100, 100, 3), (1e5, 1e3, 3)]
)
def test_the_grid_of_the_standardised_svm_goes_on_while_its_end_is_best(monkeypatch, peak, chosen, pieces):
    seen = []

    def search(x, y, values, **_):
        seen.append(values)
        scores = [-abs(np.log10(value / peak)) for value in values]
        accuracies = torch.tensor(scores, dtype=torch.float64)[:, None].expand(-1, 5)
        return probes.Search(values, accuracies, values[int(np.argmax(scores))], None)

    monkeypatch.setattr(probes, "search_svm", search)
    found = probes.PROBES["svm-standardised"](None, None, "top1")
    assert (found.chosen, len(seen)) == (chosen, pieces)
    assert found.accuracies[found.values.index(found.chosen)].mean() == found.accuracies.mean(1).max()


@pytest.mark.slow
def test_all_arms_share_the_compiled_network(images, tmp_path, monkeypatch):
    sizes = []

    def backend(graph, _):
        sizes[-1].append(len(graph.graph.nodes))
        return graph.forward

    def first(arm):
        return lambda lines, overrides: plan.trials({**overrides, "torchcompile": "on"})[arm][:2]

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(run, "measure", lambda *_: {"transfer_cv": {}})
    torch._dynamo.reset()
    for arm in ARMS:
        sizes.append([])
        monkeypatch.setattr(run, "plan", first(arm))
        lines = queue(images, tmp_path)
        assert [line.get("error") for line in lines] == [None] * len(lines)
    assert len(lines) == 2 * len(ARMS)
    assert max(sizes[0]) > 100
    assert max(map(max, filter(None, sizes[1:])), default=0) < 20


def test_mixing_on_the_device_is_that_of_timm():
    recipe = with_changes(plan.plan({})[0].recipe, {"mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1})
    labels = torch.tensor([0, 1, 2, 3])
    images = labels[:, None, None, None].expand(4, 3, 8, 8).float()  # the value of a pixel says whose it is
    mix = DeviceMixing(recipe, 5, torch.device("cpu"))
    cuts, kept = 0, []
    for _ in range(200):
        mixed, target = mix(images, labels)
        torch.testing.assert_close(target.sum(1), torch.ones(4))
        own = (mixed[1].mean() - 2) / (1 - 2)  # the share of image 1, whose partner is image 2
        smooth = torch.full((5,), 0.02)
        smooth[1] += 0.9 * own
        smooth[2] += 0.9 * (1 - own)
        torch.testing.assert_close(target[1], smooth)
        cuts += bool(((mixed[1] == 1) | (mixed[1] == 2)).all())
        kept.append(float(own))
    assert 60 < cuts < 140  # every second one
    assert 0.4 < np.mean(kept) < 0.7  # a box that is cut off at the border is smaller
    assert min(kept) < 0.1 < 0.9 < max(kept)


@pytest.mark.slow
@pytest.mark.parametrize("network", [*plan.NETWORKS])
def test_other_networks_train_with_mixing(images, tmp_path, monkeypatch, network):
    small = {"convnext": {"dims": [4, 4, 8, 64], "depths": [1, 1, 1, 1], "patch_size": 1}}
    small["vit"] = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 64, "num_heads": 2}

    def some(lines, overrides):
        overrides = {**overrides, "model_kwargs": small[network]}
        trials = plan.trials(overrides)
        done = lines_of(entry for arm in ARMS for entry in trials[arm])
        done |= lines_of(entry for arm in ARMS for entry in plan.reruns(arm, trials[arm], done, overrides))
        entries = plan.generalise(done, overrides)
        return [entries[f"{network}, {arm}"][0] for arm in ("softmax", "subspaces")]

    monkeypatch.setattr(run, "plan", some)
    monkeypatch.setattr(probes, "CS", ((0.1, 1.0, 10.0),))
    lines = queue(images, tmp_path)
    assert [line.get("error") for line in lines] == [None] * 2
    assert lines[1]["settings"]["head"]["gamma"] == pytest.approx(0.9 * (512 / plan.WIDTHS[network]) ** 0.5, rel=1e-3)
    assert lines[1]["settings"]["opt"] == "adamw"


@pytest.mark.parametrize("network", [*plan.NETWORKS])
def test_the_networks_exist_and_have_the_widths_of_the_plan(network):
    facts = plan.NETWORKS[network]
    model = create_model(facts["model"], 200, {"name": "linear"}, facts["model_kwargs"])
    (head,) = heads_of(model)
    assert head.in_features == plan.WIDTHS[network]
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 200)


@pytest.mark.parametrize("name", [heads.SOFTMAX, heads.COSINE, heads.SIGNED, heads.VARIETY, heads.MEAN])
def test_an_update_asks_nothing_of_the_device(name):
    """A CUDA graph cannot hold what waits for a number, and a tensor without data has none to give."""
    options = {"k": 4} if name in (heads.VARIETY, heads.MEAN) else {}
    options |= {"used": 0.1, "contrast": 0.1} if name == heads.VARIETY else {}
    head = create_head(name, 16, 5, device="meta", standardize=True, **options).train()
    features = torch.empty(8, 16, device="meta", requires_grad=True)
    labels = torch.zeros(8, dtype=torch.int64, device="meta")
    head.loss(features, labels, torch.nn.CrossEntropyLoss()).backward()
    assert features.grad.shape == (8, 16)


def test_mixing_asks_nothing_of_the_device():
    recipe = with_changes(plan.plan({})[0].recipe, {"mixup": 0.8, "cutmix": 1.0})
    mix = DeviceMixing(recipe, 5, torch.device("meta"))
    images, labels = torch.empty(8, 3, 4, 4, device="meta"), torch.zeros(8, dtype=torch.int64, device="meta")
    assert mix(images, labels)[1].shape == (8, 5)
