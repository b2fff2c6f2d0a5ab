"""Kernels by Triton's interpreter: in a process of its own, which has to know from its start that it interprets."""

import json
import os
import subprocess
import sys
from pathlib import Path


def interpreted(script):
    """What a script prints last, as JSON; it may import what the tests have beside them."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "ignore", "-c", script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])
