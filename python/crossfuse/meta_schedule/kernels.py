"""The kernels of a chain or of a cascade as candidates."""

from __future__ import annotations

from crossfuse.hardware import device
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.planner.cascade.shape import shape_of_cascade
from crossfuse.planner.chain.build import chain_of
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.planner.tune.kernel_space import cascade_space_of, space_of
from crossfuse.planner.tune.space import Space
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.spec import WorkloadSpec


def kernels_of(spec: WorkloadSpec | CascadeSpec, target: str) -> Space:
    """The space of all kernels of a workload.

    See `crossfuse.planner.tune.kernel_space.space_of`, and for cascades
    `crossfuse.planner.tune.kernel_space.cascade_space_of`.
    """
    known = device(target)
    if isinstance(spec, CascadeSpec):
        return cascade_space_of(shape_of_cascade(spec), known, rates_of(known))
    shape = shape_of(chain_of(spec), k_major=spec.weights == "nk")
    return space_of(shape, known, rates_of(known))


def best_candidates(spec: WorkloadSpec | CascadeSpec, target: str, count: int) -> list[Candidate]:
    """At most `count` kernels of a workload, the best by the estimate."""
    space = kernels_of(spec, target)
    return [candidate_at(space, str(spec), int(each)) for each in space.order[:count]]


def candidate_at(space: Space, spec: str, point: int) -> Candidate:
    """A point of a workload's space of kernels as a candidate, with its estimate as a note."""
    family, tiles = space.tiles(point)
    notes = {"estimate": round(float(space.prior[point]), 3)}
    return Candidate(spec, family, tiles, notes=notes)
