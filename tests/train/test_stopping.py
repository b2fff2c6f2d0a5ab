"""Signals to the processes of a run, and workers that die: what is saved, and what is said."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grassy.runs.folder import RunFolder
from grassy.runs.state import STATE, read_torch
from grassy.train import stopping
from grassy.train.loop import train
from training_cases import tiny_arrays, tiny_recipe, train_command

#: Seconds after which a run that was told to stop must have ended.
PATIENCE = 60


@pytest.fixture
def running(tmp_path):
    """A run with two workers in its third epoch, or later, that saves every now and then."""
    settings = ("epochs=100000", "loader=workers", "workers=2", "checkpoint_interval=0.2")
    command = train_command(tiny_arrays(tmp_path / "data"), tmp_path / "run", *settings)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while "epoch 3/" not in process.stderr.readline():
        assert process.poll() is None
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def children(process):
    """Process ids of its workers."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = entry.read_text().rsplit(")", 1)
        except OSError:  # it has ended meanwhile
            continue
        if int(rest.split()[1]) == process.pid:
            found.append(int(name.split()[0]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_signal_to_all_processes_in_any_order_stops_and_saves_the_run(tmp_path, running, seed):
    """As Slurm, systemd and Kubernetes send it. The workers come first for seeds 0 and 1."""
    number, draw = signal.SIGINT if seed == 1 else signal.SIGTERM, random.Random(seed)
    workers = children(running)
    assert len(workers) >= 2
    order = draw.sample([*workers, running.pid], len(workers) + 1) if seed > 1 else [*workers, running.pid]
    for process in order:
        with contextlib.suppress(ProcessLookupError):  # the run may be over before the last one is told
            os.kill(process, number)
        time.sleep(draw.choice([0, 0.01, 0.1]))
    _, errors = running.communicate(timeout=PATIENCE)
    assert running.returncode == 128 + number, errors
    assert f"and saved; `grassy train --resume {tmp_path / 'run'}` resumes the run" in errors
    assert "Traceback" not in errors
    assert read_torch(tmp_path / "run" / STATE)["progress"]["stopped_by"] == number
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


WORKERS_AND_SIGTERM = """
import multiprocessing, subprocess, sys, time
import torch
from grassy.data.batch import collate
from grassy.data.worker_processes import worker_options

multiprocessing.set_start_method(sys.argv[1])  # forkserver is the default from Python 3.14 on
samples = [(torch.zeros(3, 1, 1), 0, index, []) for index in range(20)]
loader = torch.utils.data.DataLoader(samples, batch_size=2, **worker_options(2, torch.device("cpu"), collate))
assert len(list(loader)) == 10
workers = [child for child in multiprocessing.active_children()]
assert len(workers) == 2
subprocess.run(["kill", "-TERM", *(str(worker.pid) for worker in workers)], check=True)
time.sleep(0.5)
assert all(worker.is_alive() for worker in workers)
assert len(list(loader)) == 10
for worker in workers:
    worker.terminate()
    worker.join(10)
assert not any(worker.is_alive() for worker in workers)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_only_the_main_process_ends_workers_by_sigterm_whatever_the_start_method(method):
    """In a process of its own: a library that starts a thread after each fork lets a SIGTERM through."""
    run = subprocess.run([sys.executable, "-c", WORKERS_AND_SIGTERM, method], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_run_with_one_sentence_and_the_checkpoint_stays(tmp_path, running):
    while not (tmp_path / "run" / STATE).exists():
        assert "epoch" in running.stderr.readline()
    before = read_torch(tmp_path / "run" / STATE)["progress"]
    os.kill(children(running)[0], signal.SIGKILL)  # as the kernel does if memory runs out
    _, errors = running.communicate(timeout=PATIENCE)
    assert running.returncode == 1, errors
    last = errors.strip().splitlines()[-1]
    assert "a process that loads images has died" in last, errors
    assert f"the last good checkpoint is {tmp_path / 'run' / STATE}" in last
    assert "Traceback" not in errors
    after = read_torch(tmp_path / "run" / STATE)["progress"]
    assert (after["epoch"], after["update"]) >= (before["epoch"], before["update"])
    assert not list((tmp_path / "run").glob(".writing-*"))


def test_a_signal_during_the_last_save_does_not_lose_the_finished_run(tmp_path, monkeypatch):
    def save_and_be_told_to_stop(folder, *args):
        signal.raise_signal(signal.SIGTERM)
        save(folder, *args)

    save = RunFolder.save
    monkeypatch.setattr(RunFolder, "save", save_and_be_told_to_stop)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the handler of the caller got the signal"))
    try:
        train(tiny_recipe(epochs=1), tiny_arrays(tmp_path / "data"), tmp_path / "run", device="cpu", quiet=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert read_torch(tmp_path / "run" / STATE)["progress"]["epoch"] == 1


def test_an_impatient_ctrl_c_does_not_lose_the_run_and_a_later_one_ends_it(monkeypatch, capfd, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell puts behind ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(KeyboardInterrupt), stopping.told_to_stop(True) as told:  # noqa: PT012
        assert told() == 0
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert told() == signal.SIGINT
        monkeypatch.setattr(stopping, "IMPATIENCE", 0.0)
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err.count("stopping after this update, and saving") == 1
    with stopping.told_to_stop(False) as told:
        for _ in range(2):  # a launcher may repeat it while a checkpoint is being written
            signal.raise_signal(signal.SIGTERM)
        assert told() == signal.SIGTERM
    assert capfd.readouterr().err == ""
