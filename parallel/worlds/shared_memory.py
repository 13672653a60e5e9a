"""Memory of a rank that the other ranks of its machine read: what it gives them lies there until they have read it.

    rank 0 writes its part into its own arena          rank 1 reads it there, adds, and marks it as read
    and tells rank 1 where it lies ("neighbours.py")    rank 0 may use the region again

A region is as large as a power of two, and kept for the next part of about that size. Memory is taken when it is first
written to, by the page: an arena as large as the machine's memory costs nothing until then. It has no name in any
file system, and is gone with the last process that has it mapped.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

LEAST_BITS: Final = 12  # a region has at least a page of its own
LARGE_BITS: Final = 20
"""Regions from here on, read and not of the size that is wanted, give their pages back before there is one more."""
MARKS_BYTES: Final = 1 << 20
LOOKED_AT: Final = 4
"""Regions of a size that are asked whether they are read, the longest unused first, before there is one more."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of an arena: where it begins, and its number among the marks."""

    offset: int
    number: int


class SharedMemory:
    """An arena as a process has it mapped. file: its descriptor; places: how many ranks share it."""

    def __init__(self, file: int, places: int) -> None:
        self._map = mmap.mmap(file, os.fstat(file).st_size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._places = places

    def view(self, offset: int, like: Tensor) -> Tensor:
        """What lies at `offset`, as a flat tensor with as many elements as `like`, of its dtype."""
        return self._bytes[offset : offset + like.nbytes].view(like.dtype)

    def mark_read(self, number: int, place: int) -> None:
        """Reader `place` needs the region no more."""
        self._map[number * self._places + place] = 1


class Arena(SharedMemory):
    """A rank's own arena."""

    def __init__(self, places: int) -> None:
        self.file = os.memfd_create("triaxis")
        os.ftruncate(self.file, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        super().__init__(self.file, places)
        self._regions: dict[int, deque[Region]] = {}
        self._readers: list[int] = []
        self._end = MARKS_BYTES

    def put(self, tensor: Tensor, readers: int) -> Region:
        """Copies a contiguous tensor to a region that `readers` will mark as read."""
        region = self._take(tensor.nbytes, readers)
        self.view(region.offset, tensor).copy_(tensor.view(-1))
        return region

    def _take(self, nbytes: int, readers: int) -> Region:
        bits = max(LEAST_BITS, (nbytes - 1).bit_length())
        regions = self._regions.setdefault(bits, deque())
        for _ in range(min(len(regions), LOOKED_AT)):
            region = regions[0]
            regions.rotate(-1)
            if self._is_read(region):
                break
        else:
            region = self._more(bits)
            regions.append(region)
        start = region.number * self._places
        self._map[start : start + self._places] = bytes(self._places)
        self._readers[region.number] = readers
        return region

    def _is_read(self, region: Region) -> bool:
        start = region.number * self._places
        return self._map[start : start + self._places].count(1) >= self._readers[region.number]

    def _more(self, bits: int) -> Region:
        self._give_back()
        region = Region(self._end, len(self._readers))
        self._readers.append(0)
        self._end += 1 << bits
        if self._end > len(self._map) or len(self._readers) * self._places > MARKS_BYTES:
            raise MemoryError(
                f"{self._end >> 20} MiB in {len(self._readers)} messages wait to be read by other ranks of this host, "
                "which has no room for more; start with --transport gloo"
            )
        return region

    def _give_back(self) -> None:
        """Empties large regions that were read: their pages are gone in every process that has them mapped."""
        for bits, regions in self._regions.items():
            if bits >= LARGE_BITS:
                for region in filter(self._is_read, regions):
                    self._map.madvise(mmap.MADV_REMOVE, region.offset, 1 << bits)

    def close(self) -> None:
        """The memory is released when the last process lets go of it."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
