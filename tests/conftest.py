import os
import shutil
import tempfile

import pytest
import torch
from hypothesis import settings

from grassy.torchvision_import import import_torchvision

# Tests leave nothing in the user's cache. The processes of pytest-xdist inherit the folder of the process that starts
# them, so that what is compiled is compiled once.
OWNS_CACHE = "PYTEST_XDIST_WORKER" not in os.environ
if OWNS_CACHE:
    os.environ["GRASSY_CACHE"] = tempfile.mkdtemp(prefix="grassy-tests-")

import_torchvision()  # before any test imports timm

torch.set_num_threads(1)  # the tensors of most tests are too small to be worth waking a second thread

# Machines that run the tests are noisy: hypothesis must not judge an example by its time.
settings.register_profile("grassy", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("grassy")


# A marker for what a test needs, whether it is here, and why the test is skipped where it is not.
NEEDS = {
    "gpu": (torch.cuda.is_available(), "needs a CUDA GPU"),
    "browser": (
        all(map(shutil.which, ("chromium", "chromedriver"))),
        "Chromium is missing: apt-get install chromium chromium-driver",
    ),
}


def pytest_collection_modifyitems(items):
    for item in items:
        for marker, (here, reason) in NEEDS.items():
            if item.get_closest_marker(marker) and not here:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pytest_unconfigure():
    if OWNS_CACHE:
        shutil.rmtree(os.environ["GRASSY_CACHE"], ignore_errors=True)
