"""Lists of strings and places whose memory forked worker processes share.

Whoever reads an object of Python writes its reference count, and the page of memory around it is then copied. Workers
that read a list in random order would soon have a copy of all its objects. A buffer of bytes or integers has no counts.
"""

import copy
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload


class Place(NamedTuple):
    """The location of an image's bytes: a file, or a part of one."""

    path: str
    offset: int = 0
    size: int | None = None  # None: all of the file


class Strings:
    """Strings in a buffer of bytes."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [string.encode("utf-8", "surrogateescape") for string in strings]
        self._bytes = b"".join(encoded)
        self._ends = array("q", itertools.accumulate(map(len, encoded)))
        self._starts = array("q", [0, *self._ends[:-1]])

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> "Strings": ...

    def __getitem__(self, index: int | slice) -> "str | Strings":
        if isinstance(index, slice):
            return self.some(range(len(self))[index])
        return self._bytes[self._starts[index] : self._ends[index]].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def some(self, indices: Iterable[int]) -> "Strings":
        """The strings with these indices, in the same buffer."""
        part = copy.copy(self)
        part._starts, part._ends = taken([self._starts, self._ends], indices)
        return part


class Places:
    """Places in buffers of integers, with each path once."""

    def __init__(self, places: Iterable[Place]) -> None:
        paths: dict[str, int] = {}
        self._files, self._offsets, self._sizes = array("q"), array("q"), array("q")
        for path, offset, size in places:
            self._files.append(paths.setdefault(path, len(paths)))
            self._offsets.append(offset)
            self._sizes.append(-1 if size is None else size)
        self._paths = Strings(paths)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Place:
        size = self._sizes[index]
        return Place(self._paths[self._files[index]], self._offsets[index], None if size < 0 else size)

    def __iter__(self) -> Iterator[Place]:
        return map(self.__getitem__, range(len(self)))

    def some(self, indices: Iterable[int]) -> "Places":
        """The places with these indices."""
        part = copy.copy(self)
        part._files, part._offsets, part._sizes = taken([self._files, self._offsets, self._sizes], indices)
        return part


def taken(lists: Sequence["array[int]"], indices: Iterable[int]) -> list["array[int]"]:
    """The elements with these indices, of each list."""
    indices = list(indices)
    return [array("q", map(numbers.__getitem__, indices)) for numbers in lists]
