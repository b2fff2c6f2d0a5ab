"""Whole files and folders, written under a temporary name and renamed; their locks, leftovers and SHA-256 digests."""

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

TEMPORARY = ".writing-"
#: What is unchanged for so many seconds was left by a killed process, even if a network disk does not show its lock.
STALE = 3600.0


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file under a temporary name and rename it. A crash leaves either the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        with temporary.open("xb") as file:  # tempfile would make it readable by its owner only
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            raise OSError(error.errno, f"could not be written: {error.strerror}", str(path)) from error
        raise
    sync_folder(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file of text in UTF-8, as `write_atomically` writes it."""
    write_atomically(path, lambda file: file.write(text.encode()))


def copy_atomically(source: Path, target: Path) -> None:
    """Copy the contents of a file, as `write_atomically` writes them."""
    with source.open("rb") as original:
        write_atomically(target, lambda file: shutil.copyfileobj(original, file))


@contextlib.contextmanager
def folder_when_whole(target: Path) -> Iterator[Path]:
    """A new folder that becomes the target in the end, or disappears after an error."""
    temporary = target.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_folders(target.parent)
        temporary.mkdir()
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # some network disks have no locks, which only cleaning up needs
                stack.enter_context(locked(temporary))
            yield temporary
            temporary.rename(target)
        sync_folder(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and str(error.filename or temporary).startswith(str(temporary)):
            raise OSError(error.errno, f"could not be written: {error.strerror}", str(target)) from error
        raise


def _remove_stale_folders(place: Path) -> None:
    """Remove the unfinished folders of killed processes: those without changes for an hour, which no process locks."""
    for folder in place.glob(f"{TEMPORARY}*/"):
        with contextlib.suppress(OSError), locked(folder):
            if time.time() - max(each.stat().st_mtime for each in (folder, *folder.rglob("*"))) > STALE:
                shutil.rmtree(folder)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder until the end of this process at most; an OSError if another process has locked it."""
    try:
        import fcntl
    except ImportError:  # Windows, where no folder can be opened either: treat every folder as another's
        if any(folder.iterdir()):
            raise OSError(f"{folder} may belong to another process") from None
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def remove_torn_files(folder: Path, older_than: float = 0.0) -> None:
    """Remove the temporary files of killed processes: all of them, or those without changes for so many seconds."""
    for file in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):  # it may be another user's, or another process may have removed it
            if file.is_dir():  # of `folder_when_whole`, which may be at work
                continue
            if not older_than or time.time() - file.stat().st_mtime > older_than:
                file.unlink()


def sync_file(path: Path) -> None:
    """Flush to disk a file that another library wrote."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that a rename in it survives a power failure."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
