"""A sharded weight that one process finds wrong is refused by all of them, in the same words."""

import pytest
import torch

import grassy
from ranks import on_ranks

pytestmark = pytest.mark.distributed

CLASSES, WIDTH = 7, 5  # four classes in the first process, three in the second


@pytest.mark.parametrize(
    ("rank", "value", "message"),
    [
        (0, 0.0, "weight is not a weight of subspaces: class 1 has no direction, its rows are zero"),
        (1, 0.0, "weight is not a weight of subspaces: class 5 has no direction, its rows are zero"),
        (0, torch.nan, "weight is not a weight of subspaces: its rows are orthonormal only to inf, "),
        (1, torch.nan, "weight is not a weight of subspaces: its rows are orthonormal only to inf, "),
    ],
    ids=["empty in the first", "empty in the second", "NaN in the first", "NaN in the second"],
)
def test_all_processes_refuse_what_one_of_them_finds_wrong(tmp_path, rank, value, message):
    def work(own_rank):
        torch.manual_seed(0)
        mesh = grassy.distributed.mesh("cpu")
        head = grassy.distributed.shard_head(grassy.create_head("grassmann", WIDTH, CLASSES, k=2), mesh)
        state = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in head.state_dict().items()}
        if own_rank == rank:
            state["weight"].to_local()[1] = value
        with pytest.raises(ValueError, match="is not a weight of subspaces") as caught:
            head.load_state_dict(state)
        return str(caught.value)

    first, second = on_ranks(2, tmp_path, work)
    assert first == second
    assert first.startswith(message)
