"""Heads whose classes are divided over processes (gloo, CPU) against one process that has all of them."""

import pytest
import torch

from sharded_cases import CASES, spawn, trained_by_several, trained_in_one_process

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def work(mesh):
    return {"cases": {name: trained_by_several(case, mesh) for name, case in CASES.items()}}


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{}-processes".format)
def results(request, tmp_path_factory):
    return spawn(work, request.param, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_ten_updates_are_those_of_one_process(results, name):
    first, *others = [each["cases"][name] for each in results]
    alone = trained_in_one_process(CASES[name], len(results))
    close = dict.fromkeys(("rtol", "atol"), 1e-12 if CASES[name].dtype == torch.float64 else 1e-6)
    torch.testing.assert_close(first["losses"], alone["losses"], **close)
    for what in ("gradients", "weights"):
        assert first[what].keys() == alone[what].keys()
        for key, value in alone[what].items():
            torch.testing.assert_close(first[what][key], value, **close)
            assert all(torch.equal(other[what][key], first[what][key]) for other in others)
