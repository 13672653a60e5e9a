"""What can do each operation of a layer, and why it does not here: one table, as data. No torch.

`triaxis doctor` shows it, `--kernels norm=compile,attention=flash` chooses from it; what is not chosen is torch's.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Operation(StrEnum):
    """What is chosen for itself. BLOCK: a whole layer's code, beside what it calls."""

    BLOCK = "block"
    NORM = "norm"
    ROTARY = "rotary"
    ATTENTION = "attention"
    ACTIVATION = "activation"
    LINEAR = "linear"
    LOSS = "loss"
    OPTIMIZER = "optimizer"


DEFAULT = "torch"
"""The implementation of every operation unless another is asked for: this engine's own, of torch's operators."""
HALVES = ("bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a choice depends on.

    device: cpu or cuda; dtype: of the model, such as bf16; capability: of the GPU, (9, 0) of an H100
    missing: packages and tools that cannot be used, and why
    """

    device: str
    dtype: str
    capability: tuple[int, int] = (0, 0)
    missing: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """A row of the table.

    needs: a package or tool; devices, dtypes, capability: what it runs on
    apart: why this engine does not call it, where it does not
    """

    operation: Operation
    name: str
    what: str
    needs: str | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("fp32", "fp64", *HALVES)
    capability: tuple[int, int] = (0, 0)
    apart: str = ""

    def refusal(self, facts: Facts) -> str | None:
        """Why it cannot be used; None if it can."""
        if self.apart:
            return self.apart
        if facts.device not in self.devices:
            return f"needs {' or '.join(self.devices)}, and this is {facts.device}"
        if self.needs is not None and self.needs in facts.missing:
            return facts.missing[self.needs]
        if facts.device == "cuda" and facts.capability < self.capability:
            return f"needs compute capability {'.'.join(map(str, self.capability))} or newer"
        if facts.dtype not in self.dtypes:
            return f"needs {' or '.join(self.dtypes)}, and the model is {facts.dtype}"
        return None


def _torch(operation: Operation, what: str) -> Implementation:
    return Implementation(operation=operation, name=DEFAULT, what=what)


def _row(operation: Operation, name: str, what: str, needs: str) -> Implementation:
    return Implementation(operation=operation, name=name, what=what, needs=needs, devices=("cuda",))


def _apart(operation: Operation, name: str, why: str) -> Implementation:
    return Implementation(operation=operation, name=name, what="not called", apart=f"not called: {why}")


_OWN_WEIGHTS = (
    "its module has weights of its own, where here a gradient is added into its bucket by the product itself"
)
_ONE_PASS = "torch's fused update of a whole bucket is one pass over its memory too"
_WHOLE_VOCABULARY = (
    "it wants the whole vocabulary's logits on one rank, where here they are cut over tp, and chunked"
)
TABLE: tuple[Implementation, ...] = (
    _torch(Operation.BLOCK, "the layer's code as it stands"),
    Implementation(
        operation=Operation.BLOCK, name="compile", what="torch.compile of each layer", needs="torch.compile"
    ),
    _torch(Operation.NORM, "RMS norm in one pass each way, keeping one number a row"),
    Implementation(operation=Operation.NORM, name="plain", what="torch's own rms_norm, the plain twin"),
    Implementation(
        operation=Operation.NORM,
        name="compile",
        what="torch.compile of the plain twin",
        needs="torch.compile",
    ),
    _row(Operation.NORM, "liger", "Liger's Triton kernel", "liger-kernel"),
    _row(Operation.NORM, "apex", "NVIDIA apex's fused_rms_norm_affine", "apex"),
    _apart(
        Operation.NORM, "transformer-engine", "torch's fused kernel reads and writes each element once too"
    ),
    _apart(Operation.NORM, "megatron-core", "its norm is torch's, apex's or transformer-engine's"),
    _torch(Operation.ROTARY, "turns queries and keys in place in the fused product"),
    _apart(
        Operation.ROTARY, "flash-attn", "it makes new queries and keys, where here they are turned in place"
    ),
    _apart(Operation.ROTARY, "liger", "it makes new queries and keys, where here they are turned in place"),
    _torch(Operation.ATTENTION, "torch's flash attention, by document where rows hold several"),
    Implementation(
        operation=Operation.ATTENTION, name="plain", what="one product under a mask of L × L, the plain twin"
    ),
    Implementation(
        operation=Operation.ATTENTION,
        name="short",
        what="all weights of a short row at once, elsewhere as torch",
        devices=("cpu",),
        dtypes=("bf16",),
    ),
    Implementation(
        operation=Operation.ATTENTION,
        name="flash",
        what="the flash-attn package",
        needs="flash-attn",
        devices=("cuda",),
        dtypes=HALVES,
        capability=(8, 0),
    ),
    _apart(
        Operation.ATTENTION,
        "transformer-engine",
        "it calls cuDNN's or flash-attn's kernel, as torch can itself",
    ),
    _apart(Operation.ATTENTION, "megatron-core", "its attention is transformer-engine's, or unfused"),
    _torch(Operation.ACTIVATION, "SwiGLU in one operator, keeping its input"),
    Implementation(
        operation=Operation.ACTIVATION, name="plain", what="silu(gate) · up in two operators, the plain twin"
    ),
    Implementation(
        operation=Operation.ACTIVATION,
        name="compile",
        what="torch.compile of the plain twin",
        needs="torch.compile",
    ),
    _row(Operation.ACTIVATION, "liger", "Liger's Triton kernel", "liger-kernel"),
    Implementation(
        operation=Operation.ACTIVATION,
        name="megatron-core",
        what="Megatron's fused SwiGLU, which torch.compile fuses",
        needs="megatron-core",
    ),
    _torch(Operation.LINEAR, "products that add into the gradient's bucket"),
    _apart(Operation.LINEAR, "transformer-engine", _OWN_WEIGHTS),
    _apart(
        Operation.LINEAR,
        "apex",
        "its fused_weight_gradient adds into an fp32 buffer, as torch's addmm does here",
    ),
    _torch(Operation.LOSS, "cross-entropy in chunks, its vocabulary cut over tp"),
    _apart(Operation.LOSS, "liger", _WHOLE_VOCABULARY),
    _apart(
        Operation.LOSS, "megatron-core", "it keeps a microbatch's logits whole, where here they are chunked"
    ),
    _torch(Operation.OPTIMIZER, "torch's fused update, one call a bucket"),
    _apart(Operation.OPTIMIZER, "apex", _ONE_PASS),
    _apart(Operation.OPTIMIZER, "transformer-engine", _ONE_PASS),
)


def rows_of(operation: Operation) -> dict[str, Implementation]:
    """The implementations of an operation by name, torch's first."""
    return {row.name: row for row in TABLE if row.operation is operation}


def read_choice(text: str) -> dict[Operation, str]:
    """`norm=compile,attention=flash`. Raises ValueError with the nearest that there is."""
    found: dict[Operation, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        operation, sign, name = (word.strip() for word in part.partition("="))
        if not sign or operation not in list(Operation):
            raise ValueError(_unknown(part if not sign else operation, [str(each) for each in Operation]))
        rows = rows_of(Operation(operation))
        if name not in rows:
            raise ValueError(_unknown(f"{operation}={name}", [f"{operation}={row}" for row in rows]))
        if found.get(Operation(operation), name) != name:
            raise ValueError(
                f"`kernels` must name each operation once, but names {operation} twice; leave one out"
            )
        found[Operation(operation)] = name
    return found


def chosen_kernels(text: str | None) -> dict[Operation, str]:
    """The implementation of every operation in a run that was asked for `text`."""
    return dict.fromkeys(Operation, DEFAULT) | read_choice(text or "")


def _unknown(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"; nearest: {near[0]}" if near else ""
    return (
        f"`kernels` must be OPERATION=NAME with commas between, of {', '.join(known)}, but has {word}{hint}"
    )


def choose(wishes: Mapping[Operation, str], facts: Facts) -> dict[Operation, str]:
    """The implementation of every operation. Raises ValueError where one that is asked for cannot be used here."""
    faults = []
    for operation, name in wishes.items():
        why = rows_of(operation)[name].refusal(facts)
        if why is not None:
            faults.append(
                f"`kernels` {operation}={name} cannot be used: {why}; triaxis doctor shows what can, or leave it out"
            )
    if faults:
        raise ValueError("\n".join(faults))
    return {operation: wishes.get(operation, DEFAULT) for operation in Operation}


def told_kernels(chosen: Mapping[Operation, str]) -> str:
    """`kernels: norm compile, the rest torch`."""
    others = [f"{operation} {name}" for operation, name in chosen.items() if name != DEFAULT]
    return f"kernels: {', '.join([*others, f'the rest {DEFAULT}' if others else f'all {DEFAULT}'])}"


MODULES = {
    "liger-kernel": "liger_kernel",
    "flash-attn": "flash_attn",
    "transformer-engine": "transformer_engine",
    "megatron-core": "megatron",
}
_OTHER_APEX = (
    "the `apex` that is installed is another project of that name (on PyPI it is a toolkit for web sites, and not "
    "NVIDIA's): pip uninstall apex, and build NVIDIA's from its source"
)
_NO_APEX = "not installed; NVIDIA's apex is built from its source: pip install apex brings another project of that name"


def missing_packages(device: str) -> dict[str, str]:
    """Packages and tools that cannot be used on such a device, and why. Imports none of them."""
    found = {
        name: f"not installed: pip install {name}" for name, module in MODULES.items() if not _there(module)
    }
    apex = importlib.util.find_spec("apex")
    if apex is None:
        found["apex"] = _NO_APEX
    elif not any(Path(folder, "normalization").is_dir() for folder in apex.submodule_search_locations or ()):
        found["apex"] = _OTHER_APEX
    elif not _there("fused_layer_norm_cuda"):
        found["apex"] = "NVIDIA's apex is installed without its CUDA extensions; build it with them"
    compiler = _no_triton() if device == "cuda" else _no_cpp()
    return found | ({} if compiler is None else {"torch.compile": compiler})


def _there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _no_triton() -> str | None:
    return None if _there("triton") else "needs triton, which comes with CUDA builds of torch"


def _no_cpp() -> str | None:
    names: Callable[[str], str | None] = shutil.which
    return None if any(map(names, ("c++", "g++", "clang++"))) else "needs a C++ compiler on the path"


def version_of(package: str) -> str | None:
    """The installed version of a package, which is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
