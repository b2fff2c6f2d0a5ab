"""One process at a time writes to the folder of a run."""

import os
import signal
import time

import pytest

from grassy.runs.folder import RunFolder


def test_a_worker_that_outlives_a_killed_process_does_not_keep_its_folder(tmp_path):
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.claim()
    with pytest.raises(ValueError, match="another process is writing to"):
        second.claim()
    here, there = os.pipe()
    child = os.fork()
    if child == 0:  # a worker, which lives on for a while
        os.write(there, b"!")
        time.sleep(60)
        os._exit(0)
    os.read(here, 1)
    try:
        first.release()  # as the end of the process does
        second.claim()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        second.release()
