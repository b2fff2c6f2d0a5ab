"""Lists of strings and places whose memory forked worker processes share.

Reading a Python object updates its reference count, and the page of memory around it is then copied. Workers that read
a list in random order would soon have a copy of all its objects. A buffer of bytes or integers has no counts.
"""

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
        # Names may be no text: bytes that are no UTF-8 on Linux, halves of a character on Windows.
        self._put_together([string.encode("utf-8", "surrogatepass") for string in strings])

    def _put_together(self, parts: list[bytes]) -> None:
        self._bytes = b"".join(parts)
        self._ends = array("q", itertools.accumulate(map(len, parts)))
        self._starts = array("q", [0, *self._ends][: len(parts)])

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> "Strings": ...

    def __getitem__(self, index: int | slice) -> "str | Strings":
        if isinstance(index, slice):
            return self.some(range(len(self))[index])
        return self._bytes[self._starts[index] : self._ends[index]].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def some(self, indices: Sequence[int]) -> "Strings":
        """The strings with these indices, in the same buffer."""
        part = object.__new__(Strings)
        part._bytes = self._bytes
        part._starts, part._ends = elements_at(self._starts, indices), elements_at(self._ends, indices)
        return part

    def __getstate__(self) -> dict[str, list[bytes]]:
        """A part is pickled without the strings of the others."""
        return {"parts": [self._bytes[start:end] for start, end in zip(self._starts, self._ends, strict=True)]}

    def __setstate__(self, state: dict[str, list[bytes]]) -> None:
        self._put_together(state["parts"])


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

    def some(self, indices: Sequence[int]) -> "Places":
        """The places with these indices. Paths of no place are left out."""
        part = object.__new__(Places)
        part._offsets, part._sizes = elements_at(self._offsets, indices), elements_at(self._sizes, indices)
        files = elements_at(self._files, indices)
        numbers = {file: number for number, file in enumerate(dict.fromkeys(files))}
        part._files, part._paths = array("q", map(numbers.__getitem__, files)), self._paths.some(list(numbers))
        return part


def elements_at(numbers: "array[int]", indices: Iterable[int]) -> "array[int]":
    """The elements with these indices."""
    return array("q", map(numbers.__getitem__, indices))
