"""Topology, worlds, tensor-parallel layers, pipeline schedules and ZeRO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triaxis.parallel.lazy import lazily

if TYPE_CHECKING:
    from triaxis.parallel.kernels.attention import Documents as Documents
    from triaxis.parallel.kernels.attention import documents_of as documents_of
    from triaxis.parallel.kernels.kernels import Kernels as Kernels
    from triaxis.parallel.kernels.kernels import kernels_for as kernels_for
    from triaxis.parallel.layers.build import Build as Build
    from triaxis.parallel.layers.declare import declare as declare
    from triaxis.parallel.layers.declare import declare_replicated as declare_replicated
    from triaxis.parallel.layers.declare import named_layouts as named_layouts
    from triaxis.parallel.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from triaxis.parallel.layers.linear import Part as Part
    from triaxis.parallel.layers.linear import RowParallelLinear as RowParallelLinear
    from triaxis.parallel.layers.vocabulary import VocabParallelEmbedding as VocabParallelEmbedding
    from triaxis.parallel.layers.vocabulary import VocabParallelHead as VocabParallelHead
    from triaxis.parallel.pipeline.executor import PipelineExecutor as PipelineExecutor
    from triaxis.parallel.pipeline.lowering import lower as lower
    from triaxis.parallel.pipeline.orders import make_schedule as make_schedule
    from triaxis.parallel.pipeline.schedule import Schedule as Schedule
    from triaxis.parallel.places.layout import Init as Init
    from triaxis.parallel.places.layout import ParameterLayout as ParameterLayout
    from triaxis.parallel.places.layout import replicated as replicated
    from triaxis.parallel.places.topology import Axis as Axis
    from triaxis.parallel.places.topology import Topology as Topology
    from triaxis.parallel.places.topology import resolve_topology as resolve_topology
    from triaxis.parallel.replicas.initialize import fill_module as fill_module
    from triaxis.parallel.replicas.initialize import initialize as initialize
    from triaxis.parallel.replicas.zero import ZeroDataParallel as ZeroDataParallel
    from triaxis.parallel.worlds.group import Group as Group
    from triaxis.parallel.worlds.group import World as World
    from triaxis.parallel.worlds.mesh import Mesh as Mesh
    from triaxis.parallel.worlds.mesh import build_mesh as build_mesh
    from triaxis.parallel.worlds.process import ProcessWorld as ProcessWorld
    from triaxis.parallel.worlds.process import open_process_world as open_process_world
    from triaxis.parallel.worlds.thread import run_threads as run_threads
else:  # a name is imported when it is asked for: configurations and plans start without torch
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "places.topology": (
                "Axis",
                "Topology",
                "resolve_topology",
            ),
            "places.layout": (
                "Init",
                "ParameterLayout",
                "replicated",
            ),
            "layers.declare": (
                "declare",
                "declare_replicated",
                "named_layouts",
            ),
            "worlds.group": (
                "Group",
                "World",
            ),
            "worlds.mesh": (
                "Mesh",
                "build_mesh",
            ),
            "worlds.thread": ("run_threads",),
            "worlds.process": (
                "ProcessWorld",
                "open_process_world",
            ),
            "kernels.attention": (
                "Documents",
                "documents_of",
            ),
            "kernels.kernels": (
                "Kernels",
                "kernels_for",
            ),
            "layers.build": ("Build",),
            "layers.linear": (
                "ColumnParallelLinear",
                "Part",
                "RowParallelLinear",
            ),
            "layers.vocabulary": (
                "VocabParallelEmbedding",
                "VocabParallelHead",
            ),
            "pipeline.lowering": ("lower",),
            "pipeline.orders": ("make_schedule",),
            "pipeline.schedule": ("Schedule",),
            "pipeline.executor": ("PipelineExecutor",),
            "replicas.initialize": (
                "fill_module",
                "initialize",
            ),
            "replicas.zero": ("ZeroDataParallel",),
        },
    )
