"""From a kind to the module that it names."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from triaxis.models.config import ModelConfig
from triaxis.models.kinds import Kind
from triaxis.parallel.layers.build import Build


def build_part(kind: Kind, model: ModelConfig, build: Build, name: str) -> nn.Module:
    """The module of a layer or of a part of it; `name` is what its parameters' names begin with."""
    path, _, attribute = kind.module.partition(":")
    make = getattr(import_module(path), attribute, None)
    if make is None:
        raise ValueError(
            f'`module` of {type(kind).__name__} must be "package.module:Class", but {path} has no {attribute}'
        )
    part: nn.Module = make(kind, model, build, name)
    return part
