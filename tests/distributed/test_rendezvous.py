"""Who is named when processes cannot reach each other."""

import threading
import time

import pytest
from torch.distributed import HashStore

from grassy.distributed import processes, rendezvous
from grassy.distributed.rendezvous import Meeting


def test_a_rank_that_notices_late_is_not_named_and_one_that_never_answers_is(monkeypatch):
    monkeypatch.setattr(rendezvous, "SHORTEST_ROLL_CALL", 0.1)
    store = HashStore()
    late = threading.Timer(0.3, lambda: Meeting(store, 1, 3, timeout=1).silent_ranks())
    late.start()
    monkeypatch.setattr(processes, "_meetings", [Meeting(store, 0, 3, timeout=20)])
    assert processes.missing_processes() == "rank 2 of 3 did not answer within 1 s"
    late.join()


def test_nobody_waits_longer_than_until_all_have_answered():
    store = HashStore()
    store.set("trouble/1", "")
    begin = time.monotonic()
    assert Meeting(store, 0, 2, timeout=600).silent_ranks() == []
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(("timeout", "seconds"), [(1, 2), (40, 2), (600, 30)])
def test_the_time_to_answer_grows_with_the_timeout(timeout, seconds):
    assert Meeting(HashStore(), 0, 2, timeout).roll_call == seconds
