"""The weights of a guest: as `transformers` begins with, or out of a Hugging Face folder, and back into one."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from triaxis.models.huggingface.guest import GuestModel
from triaxis.models.huggingface.guest_module import give_parameters, guest_module, without_bars
from triaxis.models.huggingface.places import Shape
from triaxis.models.huggingface.reader import SHOWN, ImportRefused, SafetensorsFolder, compare_shapes
from triaxis.parallel.places.legal_values import first_of


class _DrawnFrom(TorchDispatchMode):
    """Whatever is drawn on this thread is drawn from one generator, and nothing from that of the process."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            takes = any(argument.name == "generator" for argument in func._schema.arguments)
            func = func if takes else func.overloadpacket.generator
            given["generator"] = self._generator
        return func(*args, **given)


class TheirFirstValues:
    """What their own `_init_weights` begins with, a layer at a time: no rank has more than one in memory.

    A function of the seed and the layer's name, so that every layout begins with the same.
    """

    def __init__(self, model: GuestModel, seed: int) -> None:
        self._theirs, self._seed = guest_module(model), seed
        self._owner_of = _owners(self._theirs)
        self._held: tuple[str, dict[str, Tensor]] | None = None

    def read(self, name: str, offsets: Shape, sizes: Shape) -> Tensor:
        owner = self._owner_of[name]
        if self._held is None or self._held[0] != owner:
            self._held = owner, self._made(owner)
        values = self._held[1][name]
        return values[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))]

    @torch.no_grad()
    def _made(self, owner: str) -> dict[str, Tensor]:
        part = copy.deepcopy(self._theirs.get_submodule(owner))
        give_parameters(part, lambda _, held: torch.zeros_like(held, device="cpu"))
        digest = hashlib.sha256(f"{self._seed}/{owner}".encode()).digest()
        with _DrawnFrom(torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))):
            part.apply(self._theirs._init_weights)
        prefix = f"{owner}." if owner else ""
        found = {prefix + name: held.detach() for name, held in part.named_parameters()}
        return found | {prefix + name: held for name, held in part.named_buffers()}


def _owners(theirs: Any) -> dict[str, str]:  # noqa: ANN401
    """For each parameter and buffer the module it begins with: its layer, or what holds it outside of layers."""
    layers = {
        name
        for name, part in theirs.named_modules()
        if type(part).__name__ in (theirs._no_split_modules or ())
    }
    owners = {}
    for name in (*(n for n, _ in theirs.named_parameters()), *(n for n, _ in theirs.named_buffers())):
        path = name.split(".")[:-1]
        above = [".".join(path[:length]) for length in range(1, len(path) + 1)]
        owners[name] = next((one for one in above if one in layers), ".".join(path))
    return owners


def _kept(theirs: Any) -> dict[str, Shape]:  # noqa: ANN401
    """What their files hold, by name: each tied tensor once."""
    seen: set[int] = set()
    found = {}
    for name, tensor in theirs.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tuple(tensor.shape)
    return found


class GuestFolder:
    """A guest's weights in a Hugging Face folder. Making it checks that nothing is missing.

    Files that hold the tensors as the model does are read by slices. Others (experts one by one) `transformers` reads
    whole, on every rank.
    """

    def __init__(self, folder: Path, model: GuestModel) -> None:
        self._model, self._files = model, SafetensorsFolder(folder)
        theirs = guest_module(model)
        expected, there = _kept(theirs), self._files.shapes()
        self._name_in_file = _names(expected, there, theirs.base_model_prefix)
        named = {self._name_in_file[name]: shape for name, shape in expected.items()}
        faults = compare_shapes(named, there, (*_tied(theirs), "*.inv_freq", *_untold(theirs)))
        self._whole: dict[str, Tensor] = {}
        if faults:
            self._whole = _read_by_them(folder, theirs, faults)

    def read(self, name: str, offsets: Shape, sizes: Shape) -> Tensor:
        """A rectangle of a tensor."""
        index = tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
        return self._whole[name][index] if self._whole else self._files.read(self._name_in_file[name], index)


def _names(expected: Mapping[str, Shape], there: Mapping[str, Shape], prefix: str) -> dict[str, str]:
    """What each tensor is called in the files, which may be those of the backbone alone."""
    bare = prefix and not any(name.startswith(f"{prefix}.") for name in there)
    return {name: name.removeprefix(f"{prefix}.") if bare else name for name in expected}


def _tied(theirs: Any) -> list[str]:  # noqa: ANN401
    """Names under which a tied tensor may lie in the files a second time."""
    names = {id(tensor): name for name, tensor in reversed(theirs.state_dict(keep_vars=True).items())}
    return [name for name, tensor in theirs.state_dict(keep_vars=True).items() if names[id(tensor)] != name]


def _untold(theirs: Any) -> list[str]:  # noqa: ANN401
    """Patterns of what their model itself reads over."""
    return [f"*{pattern}*" for pattern in (theirs._keys_to_ignore_on_load_unexpected or ())]


def _read_by_them(folder: Path, theirs: Any, faults: list[str]) -> dict[str, Tensor]:  # noqa: ANN401
    """Their own reader's tensors; ImportRefused where it misses some."""
    with without_bars():
        model, told = type(theirs).from_pretrained(
            folder, config=theirs.config, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    wrong = [
        f"  {key[:-5]}: {name}" for key in ("missing_keys", "unexpected_keys") for name in sorted(told[key])
    ]
    wrong += [f"  another shape: {name}" for name in sorted(str(one) for one in told["mismatched_keys"])]
    if wrong or told.get("error_msgs"):
        raise ImportRefused(
            f"`{folder}` must hold every tensor of {theirs.config.model_type}, but:\n"
            + first_of(wrong, SHOWN, separator="\n", lead="… and")
        )
    return dict(model.state_dict())


def write_guest(
    folder: Path, model: GuestModel, read: Callable[[str, Shape, Shape], Tensor], dtype: torch.dtype
) -> int:
    """Writes a guest as its own `save_pretrained` does; returns the bytes of all tensors, which are all in memory."""
    theirs = guest_module(model, with_dropout=True)
    give_parameters(theirs, lambda name, held: read(name, (0,) * held.dim(), tuple(held.shape)).to(dtype))
    for name, buffer in theirs.named_buffers():
        if name in theirs.state_dict() and buffer.is_floating_point() and buffer.dim():
            buffer.copy_(read(name, (0,) * buffer.dim(), tuple(buffer.shape)))
    theirs.config.dtype = dtype
    with without_bars():
        theirs.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in theirs.parameters())
