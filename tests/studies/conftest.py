import pytest
from studies.tiny_imagenet.heads import OWN_HEADS

from grassy.heads import HEADS


@pytest.fixture(autouse=True)
def _heads_of_the_study(monkeypatch):
    """Registered for one test: the battery of all heads must not see them."""
    for name, head in OWN_HEADS.items():
        monkeypatch.setitem(HEADS, name, head)
