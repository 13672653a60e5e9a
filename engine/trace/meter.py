"""Sees every operation on tensors: notes its work and the bytes it takes; carries it out, or only pretends to.

Dry, no kernel runs: results are fresh tensors whose pages nobody touches, so a model of any size costs no memory,
and every number read back is one. Shapes come from PyTorch's meta kernels, once for each distinct call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from triaxis.parallel.programs.program import KINDS, Compute, MemoryCurve, MemoryKind
from triaxis.parallel.worlds.recording import Recorder

aten = torch.ops.aten
FACTORIES = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
LOOK_UPS = {"embedding", "index_add_", "gather", "index_select", "index"}  # touch rows, not the whole table
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "bincount"}
"""Operators whose result, or its size, the host needs before it goes on."""
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 10,
}
DOCUMENTS = {"_varlen_attn": 4, "_varlen_attn_backward": 10}
"""FLOPs per query, key and feature: two products forward, five backward (Dao 2023)."""
PRODUCTS = {"mm": 2, "addmm": 3}
"""Operands of products that may also be made in a wider dtype than theirs."""

Described = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class _Operator:
    """How an operator treats its tensors. kind: plain, view, scalar, factory, resize, mutating or fresh.

    reads: the host waits for it
    """

    kind: str
    mutated: tuple[tuple[int, str], ...] = ()
    returns: int = 1
    reads: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    """What one distinct call makes and costs. single: one tensor is returned, not several."""

    results: tuple[Described | object, ...]
    single: bool
    compute: Compute


@dataclass(frozen=True, slots=True)
class Known:
    """Operators and distinct calls that were met before."""

    operators: dict[Any, _Operator] = field(default_factory=dict)
    calls: dict[Any, _Call] = field(default_factory=dict)


def _operator(function: Any) -> _Operator:
    name = function._schema.name.split("::")[1]
    return replace(_kind_of(function, name), reads=name in READS)


def _kind_of(function: Any, name: str) -> _Operator:
    schema = function._schema
    if name == "resize_storage":
        return _Operator("resize")
    if name == "_local_scalar_dense":
        return _Operator("scalar")
    mutated = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if mutated:
        return _Operator("mutating", mutated, len(schema.returns))
    if not any("Tensor" in str(result.type) for result in schema.returns):
        return _Operator("plain")
    if function.is_view or any(result.alias_info is not None for result in schema.returns):
        return _Operator("view")
    return _Operator("factory" if name in FACTORIES else "fresh")


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_describe(item) for item in value)
    return value


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _flops(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    name = function._schema.name.split("::")[1]
    if name in ATTENTION:
        backward = name.endswith("backward")
        query, key = args[1:3] if backward else args[:2]
        causal = bool(args[7] if backward and len(args) > 7 else args[4] if len(args) > 4 else False)
        rows, heads, length, size = query.shape
        whole = ATTENTION[name] * rows * heads * length * key.shape[2] * size
        return int(whole // 2 if causal else whole)
    if (
        name in DOCUMENTS
    ):  # causal; the borders lie on the device, so every document counts as long as the longest
        query, longest = (args[1], args[8]) if name.endswith("backward") else (args[0], args[5])
        return int(DOCUMENTS[name] * query.numel() * longest // 2)
    if name in PRODUCTS:  # behind its operands may stand a dtype that the counter does not know
        args = args[: PRODUCTS[name]]
    packet = getattr(aten, name.removesuffix("_"), None)  # in place, the same products
    count = flop_registry.get(packet)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


class Meter(TorchDispatchMode):
    """While entered, notes operations in `recorder` and the storages that live. One rank's, in one thread.

    live_bytes: of every storage made while it was entered and not yet gone
    """

    def __init__(self, recorder: Recorder, *, dry: bool, known: Known | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self.dry = recorder, dry
        self.live_bytes = 0
        self.changes: list[tuple[int, int, int]] = []
        self.kind_of: dict[int, MemoryKind] = {}
        self.alive: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._watches: dict[int, object] = {}
        self._made = 0
        known = known or Known()
        self._operators, self._calls = known.operators, known.calls
        self._metering = True
        if not dry:  # a world's own work is neither metered nor imitated; the trace world has none
            recorder.paused = _disable_current_modes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiler is about; its guard takes longer than the rest of a dispatch

    def unmetered(self, make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes, its storage not counted."""
        self._metering = False
        try:
            return make()
        finally:
            self._metering = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = self._operators.get(function)
        if operator is None:
            operator = self._operators[function] = _operator(function)
        kind = operator.kind
        if operator.reads:
            self.recorder.host_reads.append(function._schema.name.split("::")[1])
        if kind == "view" or kind == "plain":
            return function(*args, **kwargs)
        if kind == "scalar":
            return (1 if args[0].dtype != torch.bool else True) if self.dry else function(*args, **kwargs)
        if kind == "factory":
            made = function(*args, **kwargs)
            if self._metering:
                self._track(made)
            return made
        if kind == "resize":
            function(*args)
            self._resized(args[0], args[1])
            return None
        key = (
            function,
            *[_describe(arg) if isinstance(arg, (Tensor, list, tuple)) else arg for arg in args],
            *[(name, _describe(arg)) for name, arg in kwargs.items()],
        )
        call = self._calls.get(key)
        result: Any = None
        if not self.dry:
            result = function(*args, **kwargs)
        if call is None:
            call = self._calls[key] = self._understand(function, operator, args, kwargs, result)
        self.recorder.events.append(call.compute)
        if kind == "mutating":
            return self._mutated(operator, args, kwargs) if self.dry else result
        if self.dry:
            made = [
                torch.empty_strided(item[0], item[1], dtype=item[2]) if isinstance(item, tuple) else item
                for item in call.results
            ]
            result = made[0] if call.single else tuple(made)
        for tensor in (result,) if call.single else result:
            if isinstance(tensor, Tensor):
                self._track(tensor)
        return result

    @staticmethod
    def _mutated(operator: _Operator, args: Any, kwargs: Any) -> Any:
        if operator.returns == 0:
            return None
        found = [kwargs[name] if name in kwargs else args[place] for place, name in operator.mutated]
        return found[0] if operator.returns == 1 else tuple(found)

    def _understand(self, function: Any, operator: _Operator, args: Any, kwargs: Any, result: Any) -> _Call:
        if operator.kind == "mutating":
            written = [
                kwargs[name] if name in kwargs else args[place]
                for place, name in operator.mutated
                if name in kwargs or place < len(args)
            ]
            outputs, single, results = _tensors(written), False, ()
        else:
            if self.dry:
                result = self._imagined(function, args, kwargs)
            single = isinstance(result, Tensor)
            results = tuple(_describe(item) for item in ((result,) if single else result))
            outputs = _tensors((result,) if single else result)
        name = function._schema.name.split("::")[1]
        inputs = [
            tensor
            for place, value in [*enumerate(args), *kwargs.items()]
            if place != "out"
            for tensor in _tensors((value,))
        ]
        if name in LOOK_UPS:
            inputs = sorted(inputs, key=lambda tensor: tensor.numel())[:-1] + outputs[: name == "embedding"]
            outputs = inputs if name == "index_add_" else outputs
        answer = outputs[0] if operator.kind == "mutating" and outputs else result
        worked = [args[PRODUCTS[name] - 1]] if name in PRODUCTS else outputs  # whatever it is written in
        compute = Compute(
            name,
            str(worked[0].dtype).removeprefix("torch.") if worked else "",
            _flops(function, args, {k: v for k, v in kwargs.items() if k != "out"}, answer),
            _nbytes(inputs),
            _nbytes(outputs),
        )
        return _Call(results, single, compute)

    @staticmethod
    def _imagined(function: Any, args: Any, kwargs: Any) -> Any:
        """The call on meta tensors."""

        def meta(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            if isinstance(value, (list, tuple)):
                return type(value)(meta(item) for item in value)
            return value

        kwargs = {name: meta(value) for name, value in kwargs.items()}
        if any(argument.name == "device" for argument in function._schema.arguments):
            kwargs["device"] = torch.device("meta")
        return function(*meta(list(args)), **kwargs)

    # The bytes held.

    def _change(self, number: int, delta: int) -> None:
        self.changes.append((len(self.recorder.events), number, delta))
        self.live_bytes += delta

    def _track(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":  # a shape, no memory
            return
        number = self.adopt(tensor)
        if self.alive[number]:
            self._change(number, self.alive[number])

    def adopt(self, tensor: Tensor) -> int:
        """Watches a tensor's storage as one that is counted already; returns its number."""
        storage = tensor.untyped_storage()
        number = self._made
        self._made += 1
        self.alive[number] = storage.nbytes()
        self._numbers[storage._cdata] = number
        self._watches[number] = weakref.ref(storage, self._end(number, storage._cdata))
        return number

    def _end(self, number: int, key: int) -> Any:
        def end(_reference: object) -> None:
            nbytes = self.alive.pop(number)
            if self._numbers.get(key) == number:
                del self._numbers[key]
            del self._watches[number]
            if nbytes:
                self._change(number, -nbytes)

        return end

    def _resized(self, tensor: Tensor, nbytes: int) -> None:
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is not None and self.alive[number] != nbytes:
            delta = nbytes - self.alive[number]
            self.alive[number] = nbytes
            self._change(number, delta)

    def keep(self, tensor: Tensor, kind: MemoryKind) -> None:
        """Says what a tensor's storage is held for, if it is watched and nobody has said so."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is not None:
            self.kind_of.setdefault(number, kind)

    def number_of(self, tensor: Tensor) -> int:
        """The number of a tensor's storage; -1 if it is not watched."""
        return self._numbers.get(tensor.untyped_storage()._cdata, -1)

    def disown(self, tensor: Tensor) -> None:
        """The end of a tensor's storage is told by a segment that is repeated, and not when it comes."""
        self.alive[self.number_of(tensor)] = 0

    def held(self) -> dict[MemoryKind, int]:
        """The bytes alive now, by what they are held for."""
        sums: dict[MemoryKind, int] = {}
        for number, nbytes in self.alive.items():
            kind = self.kind_of.get(number, MemoryKind.OTHER)
            sums[kind] = sums.get(kind, 0) + nbytes
        return {kind: nbytes for kind, nbytes in sums.items() if nbytes}

    def curve(self, first_event: int, first_change: int, kept_for: MemoryKind) -> MemoryCurve:
        """The changes since, in places counted from `first_event`. What was made and is still alive is `kept_for`."""
        changes = self.changes[first_change:]
        for _, number, _ in changes:
            if number not in self.kind_of:
                self.kind_of[number] = kept_for if number in self.alive else MemoryKind.TEMPORARIES
        return MemoryCurve(
            tuple(place - first_event for place, _, _ in changes),
            tuple(KINDS.index(self.kind_of[number]) for _, number, _ in changes),
            tuple(delta for _, _, delta in changes),
        )
