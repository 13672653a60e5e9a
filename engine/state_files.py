"""Optimizer states in files of a folder, mapped into memory: a rank holds those of one bucket at a time.

The update runs on the mapped pages themselves, so its numbers are those of states in memory, bit for bit.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor


class StateFiles:
    """Makes tensors in files of a folder, which have no names and so end with the process, whatever ends it."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise OSError(
                error.errno,
                f"`offload_optimizer` must be a folder that can be written, but {folder} is none ({error.strerror}); "
                "use another folder",
            ) from error
        self._folder = folder
        self._mappings: dict[int, mmap.mmap] = {}  # by where each begins in memory

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """A tensor of zeros of the same shape and dtype, in a file. Raises OSError where the folder has no room."""
        if not tensor.numel():
            return torch.zeros_like(tensor)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            try:
                # Room is taken now: a page of a mapped file that finds the disk full kills the process without a word.
                os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"`offload_optimizer` must be a folder with room for {tensor.nbytes:,} bytes more, but "
                    f"{self._folder} has none ({error.strerror}); use another folder or more ranks",
                ) from error
            mapping = mmap.mmap(file.fileno(), tensor.nbytes)
        made = torch.frombuffer(mapping, dtype=tensor.dtype).view(tensor.shape)
        self._mappings[made.data_ptr()] = mapping
        return made

    def moved(self, tensor: Tensor) -> Tensor:
        """The tensor's values in a file."""
        made = self.zeros_like(tensor).copy_(tensor)
        self.let_go((made,))
        return made

    def let_go(self, tensors: Iterable[Tensor]) -> None:
        """Unmaps the pages of the tensors (or of what they are views of) until they are used again; values stay."""
        for start in {tensor.untyped_storage().data_ptr() for tensor in tensors}:
            if (mapping := self._mappings.get(start)) is not None:
                # Of a shared mapping this drops nothing: changed pages stay in the page cache, which the kernel
                # writes to the disk as it needs the memory.
                mapping.madvise(mmap.MADV_DONTNEED)
