"""Checks of the kernels: attention, gradients of weights, head, norms, rotary positions, the update."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tests.gpu.check import Check, Figures, relative, require, seconds_of, within
from triaxis.parallel.kernels.activation import plain_swiglu
from triaxis.parallel.kernels.attention import Documents, attend_masked
from triaxis.parallel.kernels.kernels import kernels_for
from triaxis.parallel.kernels.norm import plain_rms_norm
from triaxis.parallel.kernels.products import add_product, product_for
from triaxis.parallel.kernels.rotary import rotate_
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.vocabulary import VocabParallelHead
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.worlds.mesh import build_mesh
from triaxis.parallel.worlds.thread import run_threads

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _attended(attend: object, fused: Tensor, kv_heads: int, documents: Documents | None) -> list[Tensor]:
    size = 64
    heads = fused.shape[1] // size - 2 * kv_heads
    leaf = fused.clone().requires_grad_()
    parts = (p.unflatten(-1, (-1, size)) for p in leaf.split([heads * size, *[kv_heads * size] * 2], dim=-1))
    mixed = attend(*parts, 1, documents)  # type: ignore[operator]
    mixed.float().square().sum().backward()
    assert leaf.grad is not None
    return [mixed.detach(), leaf.grad]


def attention(device: torch.device, small: bool) -> Figures:
    """Causal and packed, grouped heads and not, also with logits far below zero, against float64 under a mask."""
    figures: Figures = {}
    for length in (1, 64, 192) if small else (1, 64, 192, 704, 1000, 1024, 4096):
        packed = sorted({0, length // 3, length // 3 + 1, length} - {0}) if length > 3 else [length]
        for dtype, bound in DTYPES.items():
            for kv_heads in (2, 8):
                for documents in (None, Documents(borders=(0, *packed)).to(device)):
                    for factor in (1.0, 3.0):
                        fused = (factor * _random(length, (8 + 2 * kv_heads) * 64)).to(device, dtype)
                        kernel = kernels_for(device, dtype).attend
                        found = _attended(kernel, fused, kv_heads, documents)
                        expected = _attended(attend_masked, fused.double(), kv_heads, documents)
                        name = f"L{length} {dtype} kv{kv_heads} {'packed' if documents else 'causal'} ×{factor:g}"
                        for one, other in zip(found, expected, strict=True):
                            require(not bool(one.isnan().any()), f"{name} has NaN")
                            if float(other.norm()) > 0:
                                within(figures, name, relative(one, other), bound)
    return {"cases": len(figures), "worst": max(float(value) for value in figures.values())}


def weight_gradient(device: torch.device, small: bool) -> Figures:
    """64 microbatches of bf16 into an fp32 buffer: the sum loses nothing that fp32 has."""
    tokens, rows, columns = (32, 48, 64) if small else (1024, 4096, 4096)
    grads, inputs = _random(64, tokens, rows).bfloat16(), _random(64, tokens, columns, seed=1).bfloat16()
    target = torch.empty(rows, columns, device=device)
    product = product_for(device.type)
    for number in range(64):
        product(target, grads[number].to(device), inputs[number].to(device), number == 0)
    exact = torch.einsum("nto,nti->oi", grads.to(device).double(), inputs.to(device).double())
    # A CPU multiplies in bf16 first, which rounds each product to 8 bits.
    figures: Figures = {}
    within(figures, "relative error", relative(target, exact), 1e-5 if device.type == "cuda" else 5e-3)
    if device.type == "cuda":
        grad, rest = grads[0].to(device), inputs[0].to(device)
        alone = seconds_of(lambda: torch.mm(grad.t(), rest), device)
        within(
            figures,
            "time over mm",
            seconds_of(lambda: product(target, grad, rest, False), device) / alone,
            1.15,
        )
    return figures


def head(device: torch.device, small: bool) -> Figures:
    """The loss and its gradients, by chunks, in fp32 and bf16, against float64 as a whole."""
    figures: Figures = {}
    sizes = ((64, 32, 67),) if small else ((2048, 1024, 50257), (1024, 4096, 128256))
    for tokens, hidden, vocabulary in sizes:
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            states, weight = _random(tokens, hidden), 0.02 * _random(vocabulary, hidden, seed=1)
            labels = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(2))

            def main(world: object, states: Tensor = states, weight: Tensor = weight) -> list[Tensor]:
                return _head(world, states, weight, labels, dtype)  # noqa: B023

            (found,) = run_threads(1, main, device=str(device))
            leaves = [t.to(dtype).double().requires_grad_() for t in (states, weight)]
            loss = (
                torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].t(), labels, reduction="sum") / tokens
            )
            loss.backward()
            for what, one, other in zip(
                ("loss", "hidden", "weight"), found, (loss, leaves[0].grad, leaves[1].grad), strict=True
            ):
                assert other is not None
                within(figures, f"V{vocabulary} {dtype} {what}", relative(one, other), bound)
    return figures


def _head(world: object, states: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype) -> list[Tensor]:
    mesh = build_mesh(world, Topology())  # type: ignore[arg-type]
    build = Build.on(mesh, dtype=dtype)
    made = VocabParallelHead(build, "head.weight", *weight.shape)
    with torch.no_grad():
        made.weight.copy_(weight)
    device = mesh.world.device
    leaf = states.to(device, dtype, copy=True).requires_grad_()
    scale = torch.tensor(1 / len(labels), dtype=torch.float64, device=device)
    loss = made.loss(leaf, labels.to(device), scale)
    loss.backward()
    assert leaf.grad is not None
    assert made.weight.grad is not None
    return [loss.detach(), leaf.grad, made.weight.grad]


def elementwise(device: torch.device, small: bool) -> Figures:
    """Norm, SwiGLU and rotary positions, both ways, against float64."""
    figures: Figures = {}
    tokens, size = (64, 128) if small else (8192, 4096)
    for dtype, bound in DTYPES.items():
        kernels = kernels_for(device, dtype)
        wide = _random(tokens, size).to(device, dtype)
        weight = (1 + 0.1 * _random(size, seed=1)).to(device, dtype)
        angles = _random(tokens, 1, 32, seed=2).to(device)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        pairs = {
            "norm": (
                lambda x, w: kernels.rms_norm(x, w, 1e-5),  # noqa: B023
                lambda x, w: plain_rms_norm(x, w, 1e-5),
            ),
            "swiglu": (lambda x, w: kernels.swiglu(x), lambda x, w: plain_swiglu(x)),  # noqa: B023
            "rotary": (
                lambda x, w: rotate_(x * 1, cos, sin, size // 64, 64),  # noqa: B023
                lambda x, w: rotate_(x * 1, cos.double(), sin.double(), size // 64, 64),  # noqa: B023
            ),
        }
        for name, (kernel, twin) in pairs.items():
            results = []
            for function, kind in ((kernel, dtype), (twin, torch.float64)):
                leaves = [t.to(kind).requires_grad_() for t in (wide.detach(), weight.detach())]
                made = function(*leaves)
                made.double().square().sum().backward()
                results.append([made, leaves[0].grad])
            for one, other in zip(*results, strict=True):
                within(figures, f"{name} {dtype}", relative(one, other), bound)
    return figures


def update(device: torch.device, small: bool) -> Figures:
    """Fused AdamW on views at odd places of a flat buffer, against the same on the CPU in float64."""
    elements = 10_007 if small else 50_000_017
    values, gradient = _random(elements), _random(elements, seed=1)
    found = []
    for place, dtype in ((device, torch.float32), (torch.device("cpu"), torch.float64)):
        flat, grads = values.to(place, dtype, copy=True), gradient.to(place, dtype)
        cuts = [0, elements // 3 + 1, elements]
        runs = [flat[a:b] for a, b in pairwise(cuts)]
        optimizer = torch.optim.AdamW(runs, lr=1e-2, weight_decay=0.1, fused=True)
        for _ in range(3):
            for run, (a, b) in zip(runs, pairwise(cuts), strict=True):
                run.grad = grads[a:b]
            optimizer.step()
        found.append(flat)
    figures: Figures = {}
    within(figures, "relative error", relative(*found), 1e-6)
    return figures


def products_agree(device: torch.device, small: bool) -> Figures:
    """A product into a wider buffer and its twin, which rounds in between."""
    shape = (64, 48, 32) if small else (4096, 4096, 4096)
    grad, rest = (
        _random(shape[0], shape[1]).to(device).bfloat16(),
        _random(shape[0], shape[2]).to(device).bfloat16(),
    )
    one, other = (torch.zeros(shape[1], shape[2], device=device) for _ in range(2))
    product_for(device.type)(one, grad, rest, False)
    add_product(other, grad, rest, False)
    figures: Figures = {}
    within(figures, "relative difference", relative(one, other), 1e-2)
    return figures


CHECKS = (
    Check(name="attention", limit_seconds=120, ask=attention),
    Check(name="weight gradient", limit_seconds=60, ask=weight_gradient),
    Check(name="products agree", limit_seconds=30, ask=products_agree),
    Check(name="head", limit_seconds=90, ask=head),
    Check(name="norm, swiglu, rotary", limit_seconds=60, ask=elementwise),
    Check(name="update on views", limit_seconds=60, ask=update),
)
