"""The floor that a step is measured against is made of that step's own products, and of all of them."""

from __future__ import annotations

import torch

from benchmarks.floor import products_of, seconds_of


def test_products_are_counted_at_their_shapes_and_layouts() -> None:
    left, right = torch.ones(4, 8), torch.ones(6, 8)
    added = torch.zeros(4, 6)

    def step() -> None:
        for _ in range(3):
            left @ right.t()
        added.addmm_(left, right.t())
        left.bfloat16() @ right.t().bfloat16()
        left + 1

    found = {(one.name, one.operands, one.dtype): count for one, count in products_of(step).items()}
    operands = (((4, 8), (8, 1)), ((8, 6), (1, 8)))
    assert found[("aten::mm", operands, torch.float32)] == 3
    assert found[("aten::addmm_", (((4, 6), (6, 1)), *operands), torch.float32)] == 1
    assert sum(count for (_, _, dtype), count in found.items() if dtype == torch.bfloat16) == 1
    assert sum(found.values()) == 5
    assert len(seconds_of(products_of(step), rounds=2)) == 2
