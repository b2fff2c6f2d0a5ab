import os
import shutil
import tempfile

import pytest
import torch
from hypothesis import settings

from grassy.torchvision_import import import_torchvision

os.environ["GRASSY_CACHE"] = tempfile.mkdtemp(prefix="grassy-tests-")  # tests leave nothing in the user's cache

import_torchvision()  # before any test imports timm

torch.set_num_threads(1)  # the tensors of most tests are too small to be worth waking a second thread

# Machines that run the tests are noisy: hypothesis must not judge an example by its time.
settings.register_profile("grassy", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("grassy")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pytest_unconfigure():
    shutil.rmtree(os.environ["GRASSY_CACHE"], ignore_errors=True)
