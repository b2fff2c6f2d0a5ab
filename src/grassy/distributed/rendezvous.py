"""How the processes that torchrun started find each other, also after a restart, and which of them are missing later.

torchrun's agent hosts one store for all its restarts. A process may find entries of dead processes there. With the
address of a dead one, torch fails or waits forever (torch 2.13; pytorch issue 135712). torchrun does not count restarts
alike on all machines either. So the processes first agree on a name under which nobody has written before.

A run that other machines may join needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Then rank 0 hosts a new store at each
start. The processes meet there in the same way, so that an error can name those that are missing.
"""

import hashlib
import os
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

#: Seconds between two reads of the store.
PAUSE = 0.02
#: Processes that have given up report so to each other for this fraction of the timeout, at least for some seconds.
#: They may notice at different times that a process is missing.
ROLL_CALL, SHORTEST_ROLL_CALL = 0.05, 2.0
#: What is known if all have answered, or if torchrun's agent is gone.
UNKNOWN = "another process of this run has ended, or cannot be reached"


@dataclass(frozen=True)
class Meeting:
    """A store to which only the processes of this start write."""

    store: Store
    rank: int
    world_size: int
    timeout: float
    hosted_by_agent: bool = True  # otherwise by rank 0

    @property
    def roll_call(self) -> float:
        """Seconds within which a live process must answer."""
        return max(SHORTEST_ROLL_CALL, ROLL_CALL * self.timeout)

    def missing(self) -> str:
        """Return the beginning of a sentence that names the ranks that do not answer.

        All processes that lost their peers must call it. A rank that does not answer may be alive and not know yet that
        others are lost.
        """
        silent = [rank for rank in range(self.world_size) if rank != self.rank]
        end, until = time.monotonic() + self.roll_call, f"within {self.roll_call:g} s"
        try:
            self.store.set(f"trouble/{self.rank}", "")
            while silent and time.monotonic() < end:
                time.sleep(PAUSE)
                silent = [rank for rank in silent if not self.store.check([f"trouble/{rank}"])]
            if self.rank == 0 and not self.hosted_by_agent:
                time.sleep(10 * PAUSE)  # the store ends with this process, and others may still read it
        except DistError:  # the host of the store is gone too
            if self.hosted_by_agent:
                return UNKNOWN
            host = "rank 0, which hosts the store,"
            if 0 in silent:  # it died, or it left after its own roll call: nothing tells these cases apart
                return f"{host} is gone, perhaps because another of the {self.world_size} ranks ended before it"
            until = f"before {host} ended"
        return f"rank {', '.join(map(str, silent))} of {self.world_size} did not answer {until}" if silent else UNKNOWN


def hosted_by_agent() -> bool:
    """Whether torchrun's agent, and not a process of the run, hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(timeout: float) -> Meeting:
    """Meet the other processes of this start. Raises a ConnectionError that names those that do not come.

    Each process writes a random token. Rank 0 lists all tokens, and lists them again if one changes, because it was
    that of a dead process. A process that finds its own token in the list confirms it. The list is valid once all have
    confirmed.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, patience = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=timeout)
    by_agent = hosted_by_agent()
    hosts = rank == 0 and not by_agent
    try:
        store = TCPStore(*address, is_master=hosts, timeout=patience, wait_for_workers=False, multi_tenant=not by_agent)
    except DistError as error:
        if hosts or by_agent:
            raise
        raise ConnectionError(f"rank 0 of the {world_size} of this run did not come within {timeout:g} s") from error
    hall, own, ranks = PrefixStore("grassy", store), secrets.token_hex(8), range(world_size)
    hall.set(f"here/{rank}", own)
    end, listed = time.monotonic() + timeout, ""
    while time.monotonic() < end:
        if rank == 0 and hall.check([f"here/{each}" for each in ranks]):
            found = ",".join(hall.get(f"here/{each}").decode() for each in ranks)
            if found != listed:
                hall.set("list", listed := found)
        elif rank and hall.check(["list"]):
            found = hall.get("list").decode()
            if found.split(",")[rank : rank + 1] == [own] and len(found.split(",")) == world_size:
                listed = found
        if listed:
            name = f"start/{hashlib.sha256(listed.encode()).hexdigest()}"
            hall.set(f"{name}/yes/{rank}", "")
            if rank == 0 and hall.check([f"{name}/yes/{each}" for each in ranks]):
                hall.set(f"{name}/go", "")
            if hall.check([f"{name}/go"]):
                return Meeting(PrefixStore(f"grassy/{name}", store), rank, world_size, timeout, by_agent)
        time.sleep(PAUSE)
    missing = [each for each in ranks if not hall.check([f"here/{each}"])]
    who = f"rank {', '.join(map(str, missing))}" if missing else "a process"
    raise ConnectionError(f"{who} of the {world_size} of this run did not come within {timeout:g} s")
