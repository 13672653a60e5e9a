"""What a rank on a GPU finds in its environment before PyTorch is loaded, and why. No torch.

`triaxis train` sets what is not set; `triaxis script` writes it into every form, so that it can be seen and changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

DEFAULTS: Final[Mapping[str, str]] = {
    # Blocks that grow instead of ever more of them: stage 3 and packed rows ask for many sizes.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # A rank uses 8 to 10 streams; with the 8 queues of Hopper's default some of them would wait for each other.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # The latest 2000 operations of NCCL with what became of each, for torch's own dump; our reports do not read it.
    "TORCH_FR_BUFFER_SIZE": "2000",
    # The run says once why it ends; stacks of C++ from every rank would bury that.
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    "NCCL_DEBUG": "WARN",
}

DETERMINISTIC: Final[Mapping[str, str]] = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # One algorithm and one protocol: else the order of a sum goes by size, by which nodes and by who is free.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
}
"""Set for --deterministic whatever was there: another value would break the promise."""


def gpu_environment(given: Mapping[str, str], *, deterministic: bool) -> dict[str, str]:
    """What is to be set beside what is given."""
    missing = {name: value for name, value in DEFAULTS.items() if name not in given}
    return missing | (dict(DETERMINISTIC) if deterministic else {})
