"""`grassy train --resume auto` under torchrun: one agent with several ranks, or several agents with one rank each."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import yaml

from grassy.distributed.saves import PART, read_plain
from grassy.runs.state import SAVES, read_torch, state_in

#: Seconds in which a run that has lost a process must be back at work, on a machine that is busy.
PATIENCE = 120


class Torchrun:
    """`grassy train --resume auto` in several processes, which torchrun starts again if one of them ends."""

    def __init__(self, folder, recipe, data, output, *settings, launch=("--standalone",), ranks=2, restarts=0):
        file = folder / f"{output.name}.yaml"
        file.write_text(yaml.safe_dump(recipe.to_dict()))
        launch = [*launch, f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
        words = ["train", str(file), "--data-dir", str(data), "--output", str(output), "--resume", "auto", *settings]
        self.output, self.lines = output, []
        command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "grassy", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        """kill -9 of torchrun and of all its ranks, as if the machine were lost."""
        victims = [self.process.pid, *self.ranks().values()]  # before torchrun: it would start them again
        for pid in victims:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def pid_of(self, rank):
        """The process that torchrun has started for a rank."""
        return self.ranks()[rank]

    def ranks(self):
        """The processes that torchrun has started, by rank."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError, KeyError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    words = (folder / "environ").read_text().split("\0")
                    found[int(dict(word.split("=", 1) for word in words if "=" in word)["RANK"])] = int(folder.name)
        return found

    def wait_for(self, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, f"it has ended:\n{''.join(self.lines[-30:])}"
            assert time.monotonic() < end, f"it hangs:\n{''.join(self.lines[-30:])}"
            time.sleep(0.002)

    def finish(self):
        """What it has written to stderr."""
        said, end = 0, time.monotonic() + PATIENCE
        while self.process.poll() is None:
            if len(self.lines) > said:  # it goes on
                said, end = len(self.lines), time.monotonic() + PATIENCE
            assert time.monotonic() < end, f"it hangs:\n{''.join(self.lines[-30:])}"
            time.sleep(0.1)
        assert self.process.returncode == 0, "".join(self.lines[-30:])
        self.reader.join()
        return "".join(self.lines)


def updates_saved(output):
    """How many updates the state on the disk has seen."""
    while (path := state_in(output)) is not None:
        with contextlib.suppress(OSError, ValueError):  # a save that another one has replaced meanwhile
            saved = read_plain(path) if path.is_dir() else read_torch(path)
            return saved["progress"]["epoch"] * saved["updates"] + saved["progress"]["update"]
    return 0


def is_saving(output):
    return any(output.glob(".writing-*")) or any(output.glob(f"{SAVES}/*{PART}"))
