"""Heads whose classes are sharded over processes (gloo, CPU) against one process that has all of them."""

import functools

import pytest
import torch
from benchmarks.traffic import head_bytes, partial_fc_bytes
from torch.nn import functional as F

import grassy

from . import sharded_facts as facts
from .sharded_cases import CASES, spawn, trained_by_several, trained_in_one_process

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


SAMPLED = {
    "plain": {},
    "corrected": {"correct": True},
    "clipped": {"clip": 0.3},
    "smoothed, with mixed labels": {"smoothing": 0.1},
}


def work(mesh):
    return {
        "cases": {name: trained_by_several(case, mesh) for name, case in CASES.items()},
        "heads": facts.of_each_head(mesh),
        "unreduced": facts.unreduced(mesh),
        "meta": facts.created_on_meta(mesh),
        "traffic": facts.traffic(mesh),
        "overflow": facts.overflow_on_one_rank(mesh),
        "nan": facts.a_nan_in_one_class(mesh),
        "average": facts.averaged(mesh),
        "refused": facts.refused(mesh),
        "half": facts.half_precision(mesh),
        "sampled": [facts.sampled(mesh, **options) for options in SAMPLED.values()],
        "compiled": facts.compiled(mesh) if mesh.size() == 2 else None,
    }


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{}-processes".format)
def results(request, tmp_path_factory):
    return spawn(work, request.param, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_ten_updates_are_those_of_one_process(results, name):
    first, *others = [each["cases"][name] for each in results]
    alone = trained_in_one_process(CASES[name], len(results))
    tolerance = dict.fromkeys(("rtol", "atol"), 1e-12 if CASES[name].dtype == torch.float64 else 1e-6)
    torch.testing.assert_close(first["losses"], alone["losses"], **tolerance)
    for what in ("gradients", "weights"):
        assert first[what].keys() == alone[what].keys()
        for key, value in alone[what].items():
            torch.testing.assert_close(first[what][key], value, **tolerance)
            assert all(torch.equal(other[what][key], first[what][key]) for other in others)


@pytest.mark.parametrize("name", facts.HEADS)
def test_evaluation_gives_each_process_what_one_process_has_for_its_rows(results, name):
    alone = facts.evaluation(facts.a_head(name), facts.features())
    for what, expected in alone.items():
        close(torch.cat([each["heads"][name][what] for each in results]), expected)
    values, places = alone["logits"].topk(3)
    close(alone["top"], values)
    assert torch.equal(alone["places"], places)


@pytest.mark.parametrize("name", facts.HEADS)
def test_a_criterion_that_needs_logits_gets_them_with_their_gradient(results, name):
    alone = facts.logits_with_gradient(facts.a_head(name), facts.features(), facts.labels())
    found = [each["heads"][name]["bce"] for each in results]
    close(torch.stack([each["loss"] for each in found]).mean(), alone["loss"])
    close(torch.cat([each["x"] for each in found]) / len(results), alone["x"])
    close(found[0]["weight"], alone["weight"])


def test_losses_need_not_be_reduced(results):
    y = facts.labels()
    y[0] = -100
    logits = facts.a_head("grassmann")(facts.features())
    close(torch.cat([each["unreduced"] for each in results]), F.cross_entropy(logits, y, reduction="none"))


def test_a_head_that_is_created_shard_by_shard_does_not_depend_on_the_number_of_processes(results, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        alone = facts.created_on_meta(grassy.distributed.mesh("cpu"))
    finally:
        torch.distributed.destroy_process_group()
    for each in results:
        assert each["meta"].keys() == alone.keys()
        assert all(torch.equal(each["meta"][name], value) for name, value in alone.items())
    weight = alone["grassmann weight"]
    created = grassy.create_head("grassmann", 3, 5, k=2, learnable_gamma=True, standardize=True)
    rest = {**dict(created.named_parameters()), **dict(created.named_buffers())}
    del rest["weight"]
    assert rest.keys() >= {"gamma", "batch_norm.running_mean", "batch_norm.running_var"}
    for name, value in rest.items():  # gamma and standardisation begin as those of a head that never was on meta
        assert torch.equal(alone[f"grassmann {name}"], value), name
    assert grassy.geometry.orthonormality_error(weight) < 1e-5
    assert not torch.equal(weight[:4096], weight[4096:8192])


def test_an_update_takes_six_collectives_of_the_size_of_the_formula_and_the_step_none(results):
    for each in results:
        for (_, k), found in each["traffic"].items():
            assert sorted(found["calls"]) == [
                *["_allgather_base_"] * 3,
                "_reduce_scatter_base_",
                *["allreduce_"] * 2,
            ]
            # Of two mixed labels, three more numbers of 8 bytes for each row: a label and two weights.
            more = (len(results) - 1) * 8 * 24 if k == 3 else 0
            assert found["sent"] == pytest.approx(head_bytes(len(results), 8, 64) + more)
            assert found["step"] == []
    assert head_bytes(32, 128, 512) <= 0.76 * partial_fc_bytes(32, 128, 512)


def test_an_overflow_in_one_process_makes_all_skip_the_step(results):
    for each in results:
        skipped, made = each["overflow"]["moved"]
        assert skipped == []
        assert "3.weight" in made
        assert "0.weight" in made
        assert each["overflow"]["scale"] == 1.0


def test_a_nan_keeps_one_class_from_moving(results):
    for each in results:
        assert each["nan"]["moved"].tolist() == [c != 1 for c in range(9)]
    assert [each["nan"]["skipped"] for each in results] == [1, *[0] * (len(results) - 1)]


def test_an_average_of_sharded_models_is_that_of_whole_ones(results):
    alone = facts.averaged()
    for each in results:
        for name, value in alone.items():
            close(each["average"][name], value)


def test_what_cannot_be_done_is_said_in_one_sentence(results):
    words = {
        "all logits": "head.top(features, 5)",
        "soft targets": "takes class indices, or mixtures of a few as grassy.MixedLabels",
        "a head of another kind": "MultiHead cannot be sharded by class",
        "a sample without shards": "shard_head(model, mesh) first",
        "mixed labels for a margin": "needs class indices for its margin",
    }
    for each in results:
        assert each["refused"].keys() == words.keys()
        for name, message in each["refused"].items():
            assert words[name] in message


def test_autocast_costs_no_more_than_the_rounding_of_the_product(results):
    for (name, dtype), first in results[0]["half"].items():
        head = facts.a_head(name)
        loss = grassy.classification_loss(head, facts.features(), facts.labels())
        loss.backward()
        losses = torch.stack([each["half"][name, dtype]["loss"] for each in results])
        eps = torch.finfo(dtype).eps
        assert abs(losses.mean() - loss) < 10 * eps * loss.abs(), (name, dtype)
        assert (first["weight"] - head.weight.grad).abs().max() < 10 * eps * head.weight.grad.abs().max(), (name, dtype)


@pytest.mark.parametrize(("number", "options"), list(enumerate(SAMPLED.values())), ids=SAMPLED)
def test_a_sample_of_classes_does_not_depend_on_the_number_of_processes(results, number, options):
    alone = facts.sampled(**options)
    for each in results:
        for name, value in alone.items():
            close(each["sampled"][number][name], value)


def test_a_head_compiles_without_a_graph_break_and_a_model_under_ddp_compiles(results):
    if results[0]["compiled"] is None:
        pytest.skip("with two processes only, since compiling takes long")
    for plain, compiled in results[0]["compiled"].values():
        torch.testing.assert_close(compiled, plain)
