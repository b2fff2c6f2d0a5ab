"""Runs of several machines, of which some are lost and others join: here, agents of torchrun on one machine.

`GRASSY_KILLS=1 pytest tests/train/test_elastic.py` tries sharded heads, alone and beside FSDP2, too.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from grassy.distributed.saves import read_plain
from grassy.runs.state import SAVES, read_torch, state_in
from training_cases import tiny_arrays, tiny_recipe

from .torchrun import PATIENCE, Torchrun, updates_saved

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc"),
]

EPOCHS, UPDATES = 20, 10
#: torchrun takes an agent for lost after 4 seconds without a word, and then waits 3 for others to come.
CONF = "is_host=false,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=4"


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """What starts an agent of one rank, for a run of one to two of them; none of them hosts the rendezvous."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    data, agents = tiny_arrays(tmp_path / "data", images=80), []
    rendezvous = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    launch = ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-id=1", f"--rdzv-endpoint=localhost:{rendezvous.port}"]
    launch += ["--rdzv-conf", CONF]

    def start(recipe):
        agents.append(
            Torchrun(tmp_path, recipe, data, tmp_path / "run", "--timeout", "30", launch=launch, ranks=1, restarts=3)
        )
        return agents[-1]

    yield start
    for each in agents:
        each.kill()


def text_of(*agents):
    return "".join(line for each in agents for line in each.lines)


def wait_for(condition, *agents):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert any(each.process.poll() is None for each in agents), f"they have ended:\n{text_of(*agents)[-3000:]}"
        assert time.monotonic() < end, f"they hang:\n{text_of(*agents)[-3000:]}"
        time.sleep(0.1)


@pytest.mark.parametrize("kind", ["whole", *(["sharded", "fsdp"] if "GRASSY_KILLS" in os.environ else [])])
def test_a_run_goes_on_without_a_machine_that_is_lost_and_with_one_that_joins(agent, tmp_path, kind):
    sharding = {"whole": {}, "sharded": {"shard_head": True}, "fsdp": {"shard_head": True, "fsdp": True}}[kind]
    recipe = tiny_recipe(checkpoint_interval=1e-9, epochs=EPOCHS, val_interval=20, **sharding)
    output = tmp_path / "run"
    first, second = agent(recipe), agent(recipe)
    wait_for(lambda: updates_saved(output) > 20, first, second)
    assert "2 processes" in text_of(first, second)

    # The one with rank 0, which hosts the store of the processes and writes the records.
    lost, left = (first, second) if 0 in first.ranks() else (second, first)
    lines, begin = len(left.lines), time.monotonic()
    lost.kill()
    before = updates_saved(output)
    wait_for(lambda: "; the last good checkpoint is" in "".join(left.lines[lines:]), left)
    assert time.monotonic() - begin < 30
    assert "rank 0, which hosts the store, is gone, perhaps because" in "".join(left.lines[lines:])
    wait_for(lambda: "resumed after update" in "".join(left.lines[lines:]), left)
    said = "".join(left.lines[lines:])
    assert "1 process" in said or ", on CPU, into" in said
    assert int(re.findall(r"resumed after update (\d+)", said)[-1]) >= before
    wait_for(lambda: updates_saved(output) > before + 20, left)

    (alone,) = left.ranks().values()
    os.kill(alone, signal.SIGSTOP)  # or it might end before the other is there
    joined = agent(recipe)
    wait_for(lambda: "closing signal SIGTERM" in "".join(left.lines[lines:]), left)
    os.kill(alone, signal.SIGCONT)
    wait_for(lambda: "2 processes" in text_of(joined) + "".join(left.lines[lines:]), left, joined)
    left.finish()
    joined.finish()
    state = state_in(output)
    assert updates_saved(output) == EPOCHS * UPDATES
    rows = (read_plain(state) if state.is_dir() else read_torch(state))["progress"]["rows"]
    assert [row["epoch"] for row in rows] == list(range(EPOCHS))
    assert rows[-1]["eval_top1"] > 90
    assert (output / SAVES).is_dir() == bool(sharding)
