"""What the tests of kernels share."""

from pathlib import Path

import pytest

# Triton's interpreter and the emulated GPU take their time: what runs on them is slow.
SLOW_FIXTURES = {"report", "emulated"}


def pytest_collection_modifyitems(items):
    for item in items:  # those of all folders
        if Path(__file__).parent in item.path.parents and SLOW_FIXTURES & set(item.fixturenames):
            item.add_marker(pytest.mark.slow)
