"""One rank of DeepSpeed, for deepspeed_oracle.py: its engine on our batches, from a Hugging Face folder's weights.

torchrun --nproc-per-node 2 benchmarks/deepspeed_peer.py CASE.json ANSWER.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from triaxis.engine.data.loader import Loader
from triaxis.engine.data.source import open_source
from triaxis.models.batch import Batch


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Weight decay on matrices alone, as the Trainer has it, and we."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]


def open_loader(case: dict[str, Any], rank: int, ranks: int) -> Loader:
    config = case["deepspeed"]
    size, count = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    source = open_source(case["data"], split="train", sequence_length=case["seq"], pack=case["pack"])
    return Loader(
        source,
        seed=0,
        global_batch=size * count * ranks,
        microbatch_size=size,
        data_rank=rank,
        data_size=ranks,
        vocab_size=case["vocab_size"],
    )


def token_weights(batches: list[Batch], ranks: int) -> list[float]:
    """What makes a mean of microbatches' means the mean over the global batch's tokens."""
    counts = torch.tensor([float(batch.trained_tokens()) for batch in batches])
    total = counts.sum()
    dist.all_reduce(total)
    return [float(count * len(batches) * ranks / total) for count in counts]


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    # The shared-memory all-reduce is for inference, and takes minutes to build.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(case["folder"], dtype=torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model), config=case["deepspeed"]
    )
    loader = open_loader(case, rank, ranks)
    losses = []
    for step in range(case["steps"]):
        batches = loader.step_batches(step)
        weights = token_weights(batches, ranks) if case["by_tokens"] else [1.0] * len(batches)
        sum_of_losses = torch.zeros(())
        for batch, weight in zip(batches, weights, strict=True):
            logits = engine(input_ids=batch.tokens_BL).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels_BL.flatten()) * weight
            engine.backward(loss)
            engine.step()
            sum_of_losses += loss.detach()
        dist.all_reduce(sum_of_losses)
        losses.append(float(sum_of_losses) / (len(batches) * ranks))
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps({"losses": losses}))
    dist.barrier()
    os._exit(0)  # DeepSpeed's threads are still joinable when the interpreter tears them down, which aborts


if __name__ == "__main__":
    main()
