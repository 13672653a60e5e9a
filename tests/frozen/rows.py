"""The layouts whose behaviour is recorded: a row each, plain values only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODEL: dict[str, object] = {
    "vocab_size": 67,  # a prime
    "hidden_size": 32,
    "layers": 3,
    "heads": 8,
    "kv_heads": 2,  # fewer than tp 4
    "ffn_size": 48,
    "max_positions": 32,
    "init_std": 0.15,
}

GPT: dict[str, object] = {
    "norm": "layernorm",
    "positions": "learned",
    "activation": "gelu",
    "attention_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "kv_heads": 8,
}
QWEN: dict[str, object] = {"qk_norm": True, "head_dim": 6, "tied": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A layout, and what is trained on it.

    model: what differs from MODEL; plan: fields of the step's plan that differ from their defaults
    most_norm: a step whose gradient norm is above it is skipped, where the plan says `skip_bad`
    """

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    order: str = "tp-pp-dp"
    model: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("fp32", "fp64")
    microbatches: int = 4
    microbatch_size: int = 1
    documents: bool = False
    most_norm: float = math.inf
    rule: Mapping[str, Any] = field(default_factory=lambda: {"name": "adamw", "weight_decay": 0.1})


def _row(name: str, tp: int, pp: int, dp: int, /, **changes: object) -> Row:
    """A row. A change that is no field of `Row` is one of the plan; small buckets unless it says otherwise."""
    own = {key: value for key, value in changes.items() if key in Row.__slots__}
    plan = {"bucket_elements": 3000} | {k: v for k, v in changes.items() if k not in own}
    return Row(name=name, tp=tp, pp=pp, dp=dp, plan=plan, **own)  # type: ignore[arg-type]


SGD = {"name": "sgd"}
BF16 = ("bf16",)
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}
FOUR = {"layers": 4}
TIED = {"tied": True}
SP = {"sequence_parallel": True}
RECOMPUTED = {"recompute": "full"}

ROWS = (
    _row("one rank", 1, 1, 1),
    _row("one rank, gpt", 1, 1, 1, model=GPT),
    _row("one rank, qwen, recompute, documents", 1, 1, 1, model=QWEN, **RECOMPUTED, documents=True),
    _row("one rank, sgd, no clipping", 1, 1, 1, rule=SGD, max_grad_norm=0.0),
    _row("tp2, documents", 2, 1, 1, documents=True),
    _row("tp2 sp", 2, 1, 1, **SP),
    _row("tp4 sp, kv heads shared", 4, 1, 1, **SP),
    _row("tp4, kv heads shared, qwen, documents", 4, 1, 1, model=QWEN, documents=True),
    _row("tp8 sp, one kv head", 8, 1, 1, model={"kv_heads": 1}, **SP),
    _row("tp2 sp, gpt", 2, 1, 1, model=GPT, **SP),
    _row("tp2 sp, gpt, tied, recompute, documents", 2, 1, 1, model=GPT | TIED, **SP, **RECOMPUTED, documents=True),
    _row("pp2 gpipe", 1, 2, 1, schedule="gpipe"),
    _row("pp2 1f1b, documents", 1, 2, 1, model=FOUR, documents=True),
    _row("pp4 1f1b, fewer microbatches than stages", 1, 4, 1, model=FOUR, microbatches=3),
    _row("pp4 1f1b, 7 layers, tied", 1, 4, 1, model={"layers": 7, "tied": True}, microbatches=6),
    _row("pp2 1f1b, 2 sequences a microbatch", 1, 2, 1, microbatch_size=2, microbatches=2),
    _row("pp2 interleaved", 1, 2, 1, model=FOUR, **INTERLEAVED),
    _row("pp2 interleaved in 3, 7 layers", 1, 2, 1, model={"layers": 7}, schedule="interleaved", virtual_stages=3),
    _row("pp4 interleaved, short last group", 1, 4, 1, model={"layers": 9}, microbatches=6, **INTERLEAVED),
    _row("pp3 gpipe, gpt, tied", 1, 3, 1, model=GPT | TIED, schedule="gpipe"),
    _row("dp2 zero 0", 1, 1, 2, zero=0),
    _row("dp2 zero 1", 1, 1, 2, zero=1),
    _row("dp2 zero 2", 1, 1, 2, zero=2),
    _row("dp2 zero 3, documents", 1, 1, 2, zero=3, documents=True),
    _row("dp2 zero 3", 1, 1, 2, zero=3),
    _row("dp3 zero 2, padding", 1, 1, 3, zero=2, bucket_elements=700),
    _row("dp4 zero 3, recompute, tiny buckets", 1, 1, 4, zero=3, **RECOMPUTED, bucket_elements=64),
    _row("dp4 zero 1, sgd, clipped at 0.1", 1, 1, 4, zero=1, rule=SGD, max_grad_norm=0.1),
    _row("dp2 zero 2, one bucket", 1, 1, 2, zero=2, bucket_elements=1 << 25),
    _row("dp2 zero 1, bad steps skipped", 1, 1, 2, zero=1, skip_bad=True, most_norm=4.0),
    _row("dp2 zero 2, two sequences a microbatch", 1, 1, 2, zero=2, microbatch_size=2, microbatches=2),
    _row("tp2 dp2 zero 1, sp", 2, 1, 2, zero=1, **SP),
    _row("tp2 dp2 zero 3, sp, qwen", 2, 1, 2, zero=3, **SP, model=QWEN),
    _row("tp2 pp2, sp, gpt, tied", 2, 2, 1, **SP, model=GPT | TIED),
    _row("tp4 pp2, 5 layers, recompute", 4, 2, 1, model={"layers": 5}, **RECOMPUTED),
    _row("pp2 dp2 zero 2 gpipe", 1, 2, 2, zero=2, schedule="gpipe"),
    _row("pp2 dp2 zero 3, tied", 1, 2, 2, zero=3, model=TIED),
    _row("pp4 dp2 zero 1 interleaved, tied", 1, 4, 2, zero=1, model={"layers": 8, "tied": True}, **INTERLEAVED),
    _row("pp2 dp4 zero 2, biases", 1, 2, 4, zero=2, model={"attention_bias": True, "mlp_bias": True}, microbatches=2),
    _row("2 × 2 × 2 zero 0", 2, 2, 2, zero=0),
    _row("2 × 2 × 2 zero 1, sp, tied", 2, 2, 2, zero=1, **SP, model=TIED),
    _row("2 × 2 × 2 zero 2, sp, qwen, documents", 2, 2, 2, zero=2, **SP, model=QWEN, documents=True),
    _row("2 × 2 × 2 zero 3, sp, recompute", 2, 2, 2, zero=3, **SP, **RECOMPUTED),
    _row("2 × 2 × 2 zero 3 interleaved, gpt", 2, 2, 2, zero=3, model=GPT | FOUR, **INTERLEAVED),
    _row("2 × 2 × 2 zero 2 interleaved, sp, skipping", 2, 2, 2, zero=2, model=FOUR, **SP, skip_bad=True,
         most_norm=4.5, **INTERLEAVED),
    _row("dp-tp-pp, 2 × 2 × 2 zero 1, sp", 2, 2, 2, zero=1, order="dp-tp-pp", **SP),
    _row("pp-dp-tp, 2 × 2 × 2 zero 2, tied", 2, 2, 2, zero=2, order="pp-dp-tp", model=TIED),
    _row("tp-dp-pp, 2 × 2 × 2 zero 3, clipped at 0.1", 2, 2, 2, zero=3, order="tp-dp-pp", max_grad_norm=0.1),
    _row("one rank, bf16, documents", 1, 1, 1, dtypes=BF16, documents=True),
    _row("dp2 zero 2, bf16, summed in bf16", 1, 1, 2, zero=2, dtypes=BF16, accumulate_dtype="bf16"),
    _row("tp2 dp2 zero 3, sp, bf16", 2, 1, 2, zero=3, **SP, dtypes=BF16),
    _row("2 × 2 × 2 zero 1, sp, bf16, tied, summed in fp32", 2, 2, 2, zero=1, **SP,
         model=TIED, dtypes=BF16, accumulate_dtype="fp32"),
    _row("pp2 dp2 zero 0, bf16, gpt, recompute", 1, 2, 2, zero=0, model=GPT, dtypes=BF16, **RECOMPUTED),
    _row("dp2 zero 1, fp32 summed in bf16", 1, 1, 2, zero=1, dtypes=("fp32",), accumulate_dtype="bf16"),
)  # fmt: skip
