"""What this machine has: accelerators, links, libraries, kernels, and why others are not. Measures nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from triaxis.parallel.kernels.kernels import NAMES, facts_of
from triaxis.parallel.kernels.table import MODULES, TABLE, missing_packages, version_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A thing that may be there. detail: which, or how to get it where it is missing (`present` False)."""

    name: str
    present: bool
    detail: str


def inspect_machine() -> dict[str, tuple[Item, ...]]:
    """Everything found, by section, in the order to print."""
    return {
        "machine": _system(),
        "accelerators": _accelerators(),
        "links": _links(),
        "communication": _communication(),
        "kernels": _kernels(),
        "--kernels": _table(),
    }


def _system() -> tuple[Item, ...]:
    pages = os.sysconf("SC_PAGE_SIZE")
    total, free = pages * os.sysconf("SC_PHYS_PAGES"), pages * os.sysconf("SC_AVPHYS_PAGES")
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
    return (
        Item(
            name="system",
            present=True,
            detail=f"{platform.system()} {platform.release()}, {platform.machine()}",
        ),
        Item(
            name="processor",
            present=True,
            detail=f"{_processor()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        ),
        Item(name="memory", present=True, detail=f"{total / 1e9:.1f} GB, {free / 1e9:.1f} GB free"),
        Item(
            name="shared memory",
            present=shared > 1e9,
            detail=f"/dev/shm of {shared / 1e9:.1f} GB"
            + ("" if shared > 1e9 else ": NCCL and data loaders want more; in a container use --shm-size"),
        ),
        Item(name="Python", present=True, detail=platform.python_version()),
        Item(name="torch", present=True, detail=str(torch.__version__)),
    )


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _accelerators() -> tuple[Item, ...]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        why = (
            "torch sees none; check the driver (nvidia-smi)"
            if built
            else f"torch {torch.__version__} is built for CPUs"
        )
        return (Item(name="GPU", present=False, detail=f"{why}; ranks run on CPUs"),)
    items = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        items.append(
            Item(
                name=f"GPU {index}",
                present=True,
                detail=f"{facts.name}, {total / 1e9:.0f} GB ({free / 1e9:.0f} free), compute capability "
                f"{facts.major}.{facts.minor}, {facts.multi_processor_count} multiprocessors",
            )
        )
    return tuple(items)


def _links() -> tuple[Item, ...]:
    items = []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > 1:
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        items.append(
            Item(
                name="peer access",
                present=direct == len(pairs),
                detail=f"{direct} of {len(pairs)} ordered pairs reach each other's memory; "
                f"kinds of link: {_link_kinds() or 'unknown'}",
            )
        )
    cards = sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate"))
    rates = [f"{path.parts[4]} {path.read_text(encoding='utf-8').split(' (')[0].strip()}" for path in cards]
    missing = "none; between machines NCCL and Gloo use Ethernet"
    items.append(Item(name="InfiniBand", present=bool(rates), detail=", ".join(rates) or missing))
    for interface in sorted(Path("/sys/class/net").glob("*")):
        if interface.name != "lo":
            items.append(
                Item(name=f"network {interface.name}", present=True, detail=_network_speed(interface))
            )
    return tuple(items)


def _link_kinds() -> str:
    """NV18, PIX, SYS, … as the driver's topology matrix has them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    words = [word for line in done.stdout.splitlines() if line.startswith("GPU") for word in line.split()[1:]]
    kinds = {word for word in words if word in ("SYS", "NODE", "PHB", "PXB", "PIX") or word[:2] == "NV"}
    return ", ".join(sorted(kind for kind in kinds if not kind.startswith("NVIDIA")))


def _network_speed(interface: Path) -> str:
    try:
        megabits = int((interface / "speed").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        megabits = -1
    return f"{megabits / 1000:g} Gbit/s" if megabits > 0 else "speed unknown"


def _communication() -> tuple[Item, ...]:
    distributed = torch.distributed.is_available()
    nccl = distributed and torch.distributed.is_nccl_available()
    version = (
        ".".join(str(part) for part in torch.cuda.nccl.version())
        if nccl and torch.cuda.is_available()
        else ""
    )
    return (
        Item(
            name="NCCL",
            present=nccl and torch.cuda.is_available(),
            detail=version if version else "needs a CUDA GPU" if nccl else "this torch is built without it",
        ),
        Item(
            name="Gloo",
            present=distributed and torch.distributed.is_gloo_available(),
            detail="ranks on CPUs" if distributed else "this torch is built without torch.distributed",
        ),
    )


def _kernels() -> tuple[Item, ...]:
    return (*_attention_kernels(), *_compilers(), *_packages())


def _attention_kernels() -> tuple[Item, ...]:
    """torch's own kernels for scaled_dot_product_attention, tried on a causal bf16 case of 128 tokens."""
    if not torch.cuda.is_available():
        why = "needs a CUDA GPU; attention runs in torch's blocked CPU kernel"
        return tuple(Item(name=f"{kind} attention", present=False, detail=why) for kind in ("flash", "cuDNN"))
    from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

    head = torch.empty(1, 8, 128, 128, dtype=torch.bfloat16, device="cuda")
    case = SDPAParams(head, head, head, None, 0.0, True, False)
    capability = torch.cuda.get_device_capability()
    return tuple(
        Item(
            name=f"{kind} attention",
            present=usable,
            detail="torch's own, bf16, causal"
            if usable
            else f"refused by torch on compute capability {capability[0]}.{capability[1]} (8.0 or newer is needed)",
        )
        for kind, usable in (
            ("flash", can_use_flash_attention(case)),
            ("cuDNN", can_use_cudnn_attention(case)),
        )
    )


def _compilers() -> tuple[Item, ...]:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    return (
        Item(
            name="C++ compiler",
            present=compiler is not None,
            detail=compiler or "none on the path; torch.compile on CPUs needs one",
        ),
    )


def _packages() -> tuple[Item, ...]:
    """What the table of kernels knows of: installed, or why it cannot be used. Nothing is imported."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    missing = missing_packages(device)
    names = dict.fromkeys(("triton", *MODULES, "apex"))
    items = []
    for name in names:
        version = version_of(name)
        there = name not in missing and version is not None
        absent = _TRITON if name == "triton" else missing.get(name, "installed without its version")
        items.append(Item(name=name, present=there, detail=version if there and version else absent))
    return tuple(items)


_TRITON = "not installed; fused kernels on GPUs; comes with CUDA builds of torch"


def _table() -> tuple[Item, ...]:
    """Every implementation of every operation, for bf16 and fp32, and why it cannot be used."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {dtype: facts_of(device, dtype) for dtype in (torch.bfloat16, torch.float32)}
    items = []
    for row in TABLE:
        whys = {NAMES[dtype]: row.refusal(fact) for dtype, fact in facts.items()}
        refused = [why for why in whys.values() if why is not None]
        present = len(refused) < len(whys)
        limits = [f"not for {name}: {why}" for name, why in whys.items() if why is not None]
        detail = "; ".join([row.what, *limits]) if present else refused[0]
        items.append(Item(name=f"{row.operation}={row.name}", present=present, detail=detail))
    return tuple(items)
