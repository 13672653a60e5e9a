"""Units of ZeRO's stage 3: submodules whose parameters come before they run and go after, in both directions.

What happens around the layers 1, 2 and 3 of a chunk (g gathers, r releases; × is the layer's own work):

    forward    g1 g2 ×1 r1 | g3 ×2 r2 | ×3 r3        each layer's gather waits for itself, and starts the next one's
    backward   g3 g2 ×3 r3 | g1 ×2 r2 | ×1 r1        the next one is the layer before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from triaxis.parallel.layers.gradient import GradientSlot
from triaxis.parallel.replicas.bucket import Bucket


@dataclass(slots=True)
class Unit:
    """A submodule whose parameters are gathered and freed together. buckets: those whose parameters are sharded.

    waiting: the slots of parameters that the backward pass under way is not done with
    """

    module: nn.Module
    buckets: list[Bucket] = field(default_factory=list)
    waiting: set[GradientSlot] = field(default_factory=set)
    in_backward: bool = False

    def gather(self, following: Unit | None) -> None:
        """Waits for the unit's parameters; those of the unit that runs next are started first, to come meanwhile."""
        for bucket in self.buckets:
            bucket.start_gather()
        if following is not None:
            for bucket in following.buckets:
                bucket.start_gather()
        for bucket in self.buckets:
            bucket.gather()

    def expect(self) -> None:
        """A backward pass begins."""
        self.waiting = {slot for bucket in self.buckets for slot in bucket.slots}

    def done_with(self, slot: GradientSlot) -> None:
        """Backward is done with a parameter, though its gradient may come later; after the last one all are freed."""
        if slot in self.waiting:
            self.waiting.remove(slot)
            if not self.waiting:
                self.release_after_backward()

    def release_after_backward(self) -> None:
        self.in_backward = False
        for bucket in self.buckets:
            bucket.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """Which submodules are units: those of some classes, or the innermost ones of at least so many parameters.

    Example: with least_elements 100, of a block of 150 made of a layer of 120 and a norm of 30, the layer alone is one.
    """

    classes: tuple[type[nn.Module], ...] = ()
    least_elements: int | None = None

    def units(self, module: nn.Module) -> list[nn.Module]:
        """The units within a module, itself left out."""
        if self.least_elements is None:
            return [
                part for part in module.modules() if part is not module and isinstance(part, self.classes)
            ]
        return [part for child in module.children() for part in _large(child, self.least_elements)]


def _large(module: nn.Module, least: int) -> list[nn.Module]:
    """The innermost modules with `least` parameters or more; lists of modules do not run, so none is one."""
    found = [part for child in module.children() for part in _large(child, least)]
    runs = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if not found and runs and sum(parameter.numel() for parameter in module.parameters()) >= least:
        return [module]
    return found


def group_parameters(
    module: nn.Module, wrap: Wrapping | tuple[type[nn.Module], ...]
) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Each unit's module and its own parameters, the root first; every parameter once."""
    units = (wrap if isinstance(wrap, Wrapping) else Wrapping(classes=wrap)).units(module)
    uses: dict[nn.Parameter, int] = {}
    for unit in units:
        for parameter in unit.parameters():
            uses[parameter] = uses.get(parameter, 0) + 1
    root = [p for p in module.parameters() if uses.get(p, 0) != 1]
    return [(module, root)] + [(u, [p for p in u.parameters() if uses[p] == 1]) for u in units]


def hook_units(units: Sequence[Unit]) -> None:
    """Lets every unit, the root first, gather before it runs, and release after its forward pass."""
    for index in range(len(units)):
        _hook_unit(units, index)


def _hook_unit(units: Sequence[Unit], index: int) -> None:
    unit = units[index]

    def before_forward(_module: nn.Module, _inputs: object) -> None:
        # A layer recomputed within backward comes here too; the next in backward is the one before, hooked below.
        unit.gather(units[index + 1] if index + 1 < len(units) and not unit.in_backward else None)

    def after_forward(_module: nn.Module, _inputs: object, output: object) -> None:
        if unit.in_backward:  # recomputed: the backward pass needs them next
            return
        for bucket in unit.buckets:
            bucket.release()
        # A module's full backward hook would come after its backward; a hook on its output comes before.
        for made in tree_leaves(output):  # whichever of them backward reaches first
            if isinstance(made, Tensor) and made.requires_grad:
                made.register_hook(before_backward)

    def before_backward(_grad: Tensor) -> None:
        unit.in_backward = True
        # The root is gathered with the last unit and stays until its own last gradient: nobody needs to fetch it.
        unit.gather(units[index - 1] if index > 1 else None)

    unit.module.register_forward_pre_hook(before_forward)
    unit.module.register_forward_hook(after_forward)
