"""Whole files or none, with the permissions of any new file."""

import os
import stat

import pytest

from grassy.atomic import write_atomically


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_file_has_the_permissions_of_any_new_file_and_the_mask_of_the_process_is_left_alone(tmp_path, mask):
    """A thread that makes a file at the same moment must not find the mask of the process changed."""
    before = os.umask(mask)
    changed = []
    original = os.umask
    try:
        os.umask = lambda new: changed.append(new) or original(new)
        write_atomically(tmp_path / "file", lambda file: file.write(b"x"))
    finally:
        os.umask = original
        os.umask(before)
    assert not changed
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask
