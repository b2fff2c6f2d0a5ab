"""Runs under torchrun that lose a process, again and again, and end as if they never had.

`GRASSY_KILLS=20 pytest tests/train/test_surviving.py` kills twenty times.
"""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from grassy.distributed.saves import open_state
from grassy.distributed.state import read_saved
from grassy.runs.state import SAVES
from grassy.runs.weights import BEST, BEST_SAVES, LAST, read_weights
from training_cases import tiny_arrays, tiny_recipe

from .torchrun import Torchrun, is_saving, updates_saved

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc"),
]

KILLS = int(os.environ.get("GRASSY_KILLS", "1"))


def kill_again_and_again(run, kills, seed=1):
    """kill -9 of a random rank, the first and every other time during a save; what was saved before each."""
    draw, before = random.Random(seed), []
    for number in range(kills):
        start = updates_saved(run.output)
        run.wait_for(lambda start=start: updates_saved(run.output) > start)  # it is back at work
        time.sleep(draw.uniform(0, 0.4))
        rank = draw.randrange(2)
        victim = run.pid_of(rank)
        if number % 2 == 0:
            run.wait_for(lambda: is_saving(run.output))
        os.kill(victim, signal.SIGKILL)
        run.wait_for(lambda victim=victim: not Path(f"/proc/{victim}").exists())
        before.append(updates_saved(run.output))
    return before


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_ranks_that_are_killed_again_and_again_cost_nothing_that_was_saved(tmp_path, sharded):
    recipe = tiny_recipe(checkpoint_interval=1e-9, epochs=10 + 4 * KILLS, val_interval=10, shard_head=sharded)
    data = tiny_arrays(tmp_path / "data", images=80)
    with Torchrun(tmp_path, recipe, data, tmp_path / "run", restarts=KILLS) as run:
        before = kill_again_and_again(run, KILLS)
        text = run.finish()
    resumed = [int(number) for number in re.findall(r"resumed after update (\d+)", text)]
    print(f"killed at {before}, resumed at {resumed}")
    assert len(resumed) == KILLS
    assert all(after >= saved for after, saved in zip(resumed, before, strict=True))
    with Torchrun(tmp_path, recipe, data, tmp_path / "whole") as whole:
        whole.finish()
    for name in (SAVES, BEST_SAVES) if sharded else (LAST, BEST):
        ends, expected = read_weights(tmp_path / "run" / name), read_weights(tmp_path / "whole" / name)
        assert all(torch.equal(ends[key], expected[key]) for key in expected)
    assert not is_saving(tmp_path / "run")
    if sharded:  # the optimizer's state, too
        ends, expected = (read_saved(open_state(tmp_path / name / SAVES), "optim") for name in ("run", "whole"))
        assert all(torch.equal(ends[key], expected[key]) for key in expected)


def test_a_rank_that_is_stuck_is_named_in_time_and_the_run_goes_on_without_it(tmp_path):
    recipe = tiny_recipe(checkpoint_interval=1e-9, epochs=30, val_interval=10)
    data = tiny_arrays(tmp_path / "data", images=80)
    with Torchrun(tmp_path, recipe, data, tmp_path / "run", "--timeout", "4", restarts=1) as run:
        run.wait_for(lambda: updates_saved(tmp_path / "run") > 20)
        stuck = run.pid_of(1)
        os.kill(stuck, signal.SIGSTOP)
        begin = time.monotonic()
        run.wait_for(lambda: any("rank 1 of 2 did not answer within 2 s" in line for line in run.lines))
        assert time.monotonic() - begin < 30  # 4, 2 for the roll call, and a busy machine
        os.kill(stuck, signal.SIGKILL)  # as torchrun does by itself half a minute later
        assert "resumed after update" in run.finish()
    assert updates_saved(tmp_path / "run") == 300
