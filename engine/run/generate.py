"""What a trained model writes: greedy or sampled, a token at a time, from a checkpoint or a Hugging Face folder.

There is no cache of keys and values: each token runs the whole text again. It is for a look at what was learnt, not for
serving; an exported model serves elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from triaxis.engine.checkpoint.folder import checkpoints_at
from triaxis.engine.checkpoint.manifest import read_manifest
from triaxis.engine.data.tokenizer import BYTE_END
from triaxis.engine.run.export import model_of_checkpoint
from triaxis.engine.run.weights import StoredWeights
from triaxis.models.batch import Batch
from triaxis.models.huggingface.families import CONFIG
from triaxis.models.huggingface.folder import open_weights
from triaxis.models.presets import load_config
from triaxis.models.stage import ModelStage, build_stage
from triaxis.models.weights import Weights, filler, whole_shapes
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.declare import states_of
from triaxis.parallel.replicas.initialize import fill_module
from triaxis.parallel.worlds.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """Text to ids and back; end: the id after which nothing more is written, None where there is none."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end: int | None


def bytes_codec() -> Codec:
    """UTF-8, for models that were trained on bytes."""
    return Codec(
        encode=lambda text: list(text.encode()),
        decode=lambda ids: bytes(number for number in ids if number < 256).decode(errors="replace"),
        end=BYTE_END,
    )


def open_codec(path: str | None) -> Codec:
    """Bytes without a path; a tokenizer.json; or a folder in Hugging Face's layout, none of whose code is run."""
    if path is None:
        return bytes_codec()
    if Path(path).is_dir():
        from transformers import AutoTokenizer  # slow to import

        tokens = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        return Codec(
            encode=lambda text: list(tokens.encode(text)),
            decode=lambda ids: str(tokens.decode(list(ids))),
            end=tokens.eos_token_id,
        )
    from tokenizers import Tokenizer

    file = Tokenizer.from_file(path)
    return Codec(
        encode=lambda text: list(file.encode(text).ids),
        decode=lambda ids: str(file.decode(list(ids))),
        end=None,
    )


def open_model(path: Path, mesh: Mesh, dtype: torch.dtype = torch.float32) -> tuple[ModelStage, str | None]:
    """A whole model cut over tp, with its weights, and where its tokenizer is. Collective.

    path: a Hugging Face folder, a checkpoint, or a run's output directory (its newest checkpoint)
    """
    if (path / CONFIG).is_file():
        model = load_config(str(path))
        weights: Weights = open_weights(path, model)
        tokenizer: str | None = str(path)
    else:
        found = checkpoints_at(path)
        if not found:
            raise ValueError(
                f"`MODEL` must be a Hugging Face folder, a checkpoint or a run's output directory, but {path} is none; "
                "check the path, or train with --save_steps"
            )
        state = read_manifest(found[-1]).state
        model = replace(model_of_checkpoint(found[-1], state), depths=0)  # text comes a token at a time
        weights = StoredWeights(found[-1], whole_shapes(model))
        named = state.config.get("tokenizer") or state.config.get("model_name_or_path")
        tokenizer = str(named) if named else None
    stage = build_stage(model, Build.on(mesh, dtype=dtype))
    fill = filler(weights)
    fill_module(stage, fill)
    for layout, state_tensor in states_of(stage):
        fill(layout, state_tensor.view(-1), 0)
    return stage, tokenizer


@torch.no_grad()
def write(
    stage: ModelStage,
    prompt: Sequence[int],
    *,
    tokens: int,
    end: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """The ids that follow a prompt, up to `tokens` of them or the end's; the same on every rank.

    temperature: 0 takes the likeliest each time; above, logits are divided by it. top_k: draw among so many only
    """
    window = stage.config.max_positions
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt) or [0 if end is None else end]
    for _ in range(tokens):
        seen = ids[-window:]
        logits_V = stage.logits(None, _batch(seen, stage.device()))[-1].double().cpu()
        ids.append(_drawn(logits_V, temperature, top_k, generator))
        if ids[-1] == end:
            return
        yield ids[-1]


def _drawn(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < logits_V.numel():
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))


def _batch(ids: Sequence[int], device: torch.device) -> Batch:
    tokens_BL = torch.tensor([list(ids)], device=device)
    return Batch(
        tokens_BL=tokens_BL,
        labels_BL=tokens_BL,
        positions_BL=torch.arange(len(ids), device=device)[None],
        documents=None,
    )
