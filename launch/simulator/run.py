"""From flags to a simulation: trace, prove, price."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from triaxis.engine.plan import StepPlan
from triaxis.engine.trace.cluster import trace_cluster
from triaxis.launch.hardware.hardware import Hardware
from triaxis.launch.simulator.result import Simulation, price
from triaxis.launch.simulator.timeline import Disturbance
from triaxis.parallel.places.topology import Topology
from triaxis.parallel.programs.program import Cluster
from triaxis.parallel.programs.proof import prove
from triaxis.parallel.programs.shrink import Smallest, smallest

MOST_MICROBATCHES = 8


def simulate_run(
    plan: StepPlan,
    topology: Topology,
    hardware: Hardware,
    *,
    target: str = "cpu",
    slower: Mapping[int, float] | None = None,
    links: Mapping[int, float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Simulation:
    """One optimizer step of the run on every rank. slower, links: factors by rank (see `Disturbance`).

    target: "cuda" for the path that a GPU takes through layers, "cpu" for the one that was measured here
    """
    cluster = trace_cluster(plan, topology, target=target, progress=progress)
    disturbance = Disturbance(slower=slower or {}, links=links or {})
    return price(plan, topology, cluster, prove(cluster), hardware, disturbance)


def smallest_fault(plan: StepPlan, topology: Topology) -> Smallest | None:
    """The fewest stages and microbatches that still break the proof, with as many layers as stages need."""
    chunks = plan.virtual_stages

    def build(pp: int, microbatches: int) -> Cluster:
        model = replace(plan.model, layers=pp * chunks)
        small = replace(plan, model=model, microbatches=microbatches)
        return trace_cluster(small, replace(topology, pp=pp, dp=min(topology.dp, 2)), repeat=False)

    return smallest(build, topology.pp, min(plan.microbatches, MOST_MICROBATCHES))
