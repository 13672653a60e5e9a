"""Model configurations, presets, blocks and the builder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triaxis.parallel.lazy import lazily

if TYPE_CHECKING:
    from triaxis.models.batch import IGNORED as IGNORED
    from triaxis.models.batch import Batch as Batch
    from triaxis.models.batch import Inputs as Inputs
    from triaxis.models.batch import Output as Output
    from triaxis.models.batch import SequenceContext as SequenceContext
    from triaxis.models.builder import Stage as Stage
    from triaxis.models.builder import build_model as build_model
    from triaxis.models.config import ModelConfig as ModelConfig
    from triaxis.models.config import NormKind as NormKind
    from triaxis.models.fields import PositionKind as PositionKind
    from triaxis.models.fields import dense_model as dense_model
    from triaxis.models.fields import fields_of as fields_of
    from triaxis.models.fields import with_fields as with_fields
    from triaxis.models.huggingface.folder import export as export
    from triaxis.models.huggingface.folder import open_weights as open_weights
    from triaxis.models.kinds import ActivationKind as ActivationKind
    from triaxis.models.kinds import Cut as Cut
    from triaxis.models.kinds import Dense as Dense
    from triaxis.models.kinds import GroupedAttention as GroupedAttention
    from triaxis.models.kinds import Kind as Kind
    from triaxis.models.kinds import Layer as Layer
    from triaxis.models.norm import Norm as Norm
    from triaxis.models.norm import hidden_norm as hidden_norm
    from triaxis.models.parts import build_part as build_part
    from triaxis.models.positions import Learned as Learned
    from triaxis.models.positions import LinearScaling as LinearScaling
    from triaxis.models.positions import Llama3Scaling as Llama3Scaling
    from triaxis.models.positions import Rope as Rope
    from triaxis.models.positions import YarnScaling as YarnScaling
    from triaxis.models.presets import PRESETS as PRESETS
    from triaxis.models.presets import load_config as load_config
    from triaxis.models.presets import preset as preset
    from triaxis.models.weights import filler as filler
else:  # a name is imported when it is asked for: configurations and plans start without torch
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "batch": (
                "IGNORED",
                "Batch",
                "Inputs",
                "Output",
                "SequenceContext",
            ),
            "builder": (
                "Stage",
                "build_model",
            ),
            "config": (
                "ModelConfig",
                "NormKind",
            ),
            "fields": (
                "PositionKind",
                "dense_model",
                "fields_of",
                "with_fields",
            ),
            "kinds": (
                "ActivationKind",
                "Cut",
                "Dense",
                "GroupedAttention",
                "Kind",
                "Layer",
            ),
            "norm": (
                "Norm",
                "hidden_norm",
            ),
            "parts": ("build_part",),
            "positions": (
                "Learned",
                "LinearScaling",
                "Llama3Scaling",
                "Rope",
                "YarnScaling",
            ),
            "presets": (
                "PRESETS",
                "load_config",
                "preset",
            ),
            "weights": ("filler",),
            "huggingface.folder": (
                "export",
                "open_weights",
            ),
        },
    )
