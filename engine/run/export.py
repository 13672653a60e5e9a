"""A checkpoint of this engine as a folder that Hugging Face's programs load, from any layout, by one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from triaxis.engine.checkpoint.manifest import CheckpointError, RunState, read_manifest
from triaxis.engine.run.weights import StoredWeights
from triaxis.models.config import ModelConfig
from triaxis.models.fields import config_from_fields
from triaxis.models.huggingface.families import model_of
from triaxis.models.huggingface.folder import Export, Exported
from triaxis.models.huggingface.writer import Read
from triaxis.models.presets import load_config
from triaxis.models.weights import whole_shapes
from triaxis.parallel.places.legal_values import counted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_checkpoint(
    path: Path, folder: Path, *, dtype: str | None = None, source: Path | None = None
) -> Exported:
    """Writes the weights of a checkpoint to a new folder.

    dtype: fp32, bf16 or fp16; None: that of the run. source: the Hugging Face folder that the run began with, whose
    config.json, tokenizer and chat template go along; None: as the checkpoint says, if it is still there
    """
    to, read = opened_export(path, folder, dtype=dtype, source=source)
    to.begin()
    return to.finish(to.write(read))


def opened_export(
    path: Path, folder: Path, *, dtype: str | None = None, source: Path | None = None
) -> tuple[Export, Read]:
    """The export of a checkpoint, not begun, and what reads its tensors. As `export_checkpoint` says."""
    state = read_manifest(path).state
    source = source or _source(state)
    model = model_of_checkpoint(path, state, source)
    run_dtype = str(state.config.get("dtype"))
    chosen = DTYPES[dtype or (run_dtype if run_dtype in DTYPES else "fp32")]
    weights = StoredWeights(path, whole_shapes(model))
    asked = state.config.get("tokenizer")
    tokenizer = Path(str(asked)) if asked and Path(str(asked)).exists() else None
    return Export(folder, model, dtype=chosen, source=source, tokenizer=tokenizer), weights.read


def _source(state: RunState) -> Path | None:
    """The Hugging Face folder that a run began with, if it is still there."""
    named = state.config.get("model_name_or_path")
    return Path(str(named)) if named and Path(str(named)).is_dir() else None


def model_of_checkpoint(path: Path, state: RunState, source: Path | None = None) -> ModelConfig:
    """The model of a checkpoint: of its Hugging Face folder, by its flat fields, or by the name that the run gave."""
    source = source or _source(state)
    depths = int(str(state.config.get("mtp_depths", 0)))
    model = _model_without_depths(path, state, source)
    return replace(model, depths=depths) if depths else model


def _model_without_depths(path: Path, state: RunState, source: Path | None) -> ModelConfig:
    if source is not None:
        return load_config(str(source))
    facts = state.extra.get("facts")
    fields = facts.get("model") if isinstance(facts, dict) else None
    if isinstance(fields, dict) and "model_type" in fields:
        return model_of(fields, str(path))
    if isinstance(fields, dict) and "repeating" not in fields:
        flat = {name: value for name, value in fields.items() if name != "depths"}
        return config_from_fields({"name": "model", **flat}, str(path))
    named = state.config.get("model_name_or_path") or state.config.get("model")
    try:
        return load_config(str(named))
    except ValueError as error:
        raise CheckpointError(
            f"{path} must say what model it holds, but its run named {named}: {error}; give the "
            "Hugging Face folder with --source"
        ) from error


def exported_text(done: Exported) -> str:
    """One line of what was written."""
    beside = f", with {', '.join(done.carried)}" if done.carried else ""
    left_out = ""
    if done.depths_left_out:
        left_out = (
            f", without {counted(done.depths_left_out, 'extra prediction depth')}, for which it has no place"
        )
    return (
        f"exported {done.architecture}, {done.size_bytes / 1e6:,.3g} MB, to {done.folder}{beside}{left_out}"
    )


def write_file(path: Path, file: Path, *, dtype: str) -> str:
    """Writes all weights to one new safetensors file, under this engine's names; says so in a line."""
    if file.exists():
        raise ValueError(f"`{file}` must be a new file, but exists; name another")
    state = read_manifest(path).state
    model = model_of_checkpoint(path, state)
    shapes = whole_shapes(model)
    weights = StoredWeights(path, shapes)
    tensors = {
        name: weights.read(name, (0,) * len(shape), shape).to(DTYPES[dtype]) for name, shape in shapes.items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    return f"wrote {counted(len(tensors), 'tensor')}, {size / 1e6:,.3g} MB in {dtype}, to {file}"
