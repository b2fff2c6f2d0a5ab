"""Who is named when processes cannot reach each other."""

import multiprocessing
import os
import socket
import threading
import time

import pytest
from torch.distributed import HashStore

from grassy.distributed import processes, rendezvous
from grassy.distributed.rendezvous import Meeting


def test_a_rank_that_notices_late_is_not_named_and_one_that_never_answers_is(monkeypatch):
    monkeypatch.setattr(rendezvous, "SHORTEST_ROLL_CALL", 0.1)
    store = HashStore()
    late = threading.Timer(0.3, lambda: Meeting(store, 1, 3, timeout=1).missing())
    late.start()
    monkeypatch.setattr(processes, "_meetings", [Meeting(store, 0, 3, timeout=20)])
    assert processes.missing_processes() == "rank 2 of 3 did not answer within 1 s"
    late.join()


def test_nobody_waits_longer_than_until_all_have_answered():
    store = HashStore()
    store.set("trouble/1", "")
    begin = time.monotonic()
    assert Meeting(store, 0, 2, timeout=600).missing() == rendezvous.UNKNOWN
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(("timeout", "seconds"), [(1, 2), (40, 2), (600, 30)])
def test_the_time_to_answer_grows_with_the_timeout(timeout, seconds):
    assert Meeting(HashStore(), 0, 2, timeout).roll_call == seconds


# ---------------------------------------------------------------------- one of three ranks ends; rank 0 hosts the store

FORK = multiprocessing.get_context("fork")
HOST_IS_GONE = "rank 0, which hosts the store, is gone, perhaps because another of the 3 ranks ended before it"


def lose_a_rank(rank, port, lost, seconds, begin, joined, said):
    """Join, end if this is the lost rank, and otherwise say who is missing, once `begin` is set."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    rendezvous.SHORTEST_ROLL_CALL = seconds
    try:
        processes._start("gloo", 10)
        joined.wait(60)
        if rank != lost:
            begin.wait(60)
            with pytest.raises(RuntimeError):
                processes.gathered([rank])
            said.put((rank, processes.missing_processes()))
    finally:
        os._exit(0)  # without waiting for threads of gloo


def what_the_others_say(lost, seconds=1.0, late=False):
    """The sentence of each rank left. Rank 1 waits for `seconds`; if `late`, it begins after rank 0 has ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said, joined, now, later = FORK.SimpleQueue(), FORK.Barrier(3), FORK.Event(), FORK.Event()
    now.set()
    patience = [(1.0, now), (seconds, later if late else now), (1.0, now)]
    arguments = [(rank, port, lost, *patience[rank], joined, said) for rank in range(3)]
    ranks = [FORK.Process(target=lose_a_rank, args=each) for each in arguments]
    for each in ranks:
        each.start()
    ranks[0].join(60)
    later.set()
    for each in ranks:
        each.join(60)
        each.kill()
    return dict(said.get() for _ in range(2) if not said.empty())


@pytest.mark.distributed
def test_all_that_notice_in_time_name_the_rank_that_ended():
    said = what_the_others_say(lost=2)
    assert said.keys() == {0, 1}
    assert all(sentence.startswith("rank 2 of 3 did not answer") for sentence in said.values()), said


@pytest.mark.distributed
def test_a_rank_that_still_waits_when_the_host_leaves_names_the_rank_that_ended():
    said = what_the_others_say(lost=2, seconds=30)
    assert said[1] == "rank 2 of 3 did not answer before rank 0, which hosts the store, ended"


@pytest.mark.distributed
def test_a_rank_that_notices_after_the_host_has_left_does_not_take_it_for_the_first_to_end():
    assert what_the_others_say(lost=2, late=True) == {
        0: "rank 1, 2 of 3 did not answer within 1 s",
        1: HOST_IS_GONE,
    }


@pytest.mark.distributed
def test_a_host_that_ends_first_is_named():
    assert what_the_others_say(lost=0) == {1: HOST_IS_GONE, 2: HOST_IS_GONE}
