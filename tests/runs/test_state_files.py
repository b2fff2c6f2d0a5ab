"""A state to resume from is read only if it is undamaged."""

import pytest
import torch

from grassy.runs.state import read_torch, write_torch

STATE = {"progress": {"epoch": 3, "best": 0.5}, "model": {"weight": torch.arange(40.0), "bias": torch.ones(3)}}


def test_every_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / "resume.pt"
    write_torch(STATE, path)
    whole = path.read_bytes()
    for place in {*range(0, len(whole), 9), *range(len(whole) - 80, len(whole))}:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        if len(whole) - 78 <= place < len(whole) - 64:  # without its mark it is a file of an earlier version
            assert_same(read_torch(path))
        else:
            with pytest.raises(ValueError, match=r"resume\.pt is damaged: its SHA-256 is no longer"):
                read_torch(path)


def test_a_file_of_an_earlier_version_without_a_digest_is_read(tmp_path):
    torch.save(STATE, tmp_path / "resume.pt")
    assert_same(read_torch(tmp_path / "resume.pt"))


def test_torch_reads_a_file_with_a_digest(tmp_path):
    """So do earlier versions, which know nothing of it."""
    write_torch(STATE, tmp_path / "resume.pt")
    assert_same(torch.load(tmp_path / "resume.pt", weights_only=True))


def assert_same(state):
    assert state["progress"] == STATE["progress"]
    assert all(torch.equal(state["model"][name], STATE["model"][name]) for name in STATE["model"])
