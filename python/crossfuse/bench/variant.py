"""One way to compute a workload, and the refusal of a way that there is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.errors import RefusedError, WorkloadRefused, refuse

if TYPE_CHECKING:
    from crossfuse.runtime.resources import ResourceUsage


def pack_apart(weights: Mapping[str, Any]) -> tuple[Any, ...]:
    """Copy every weight as it is, also its strides, in the order of the mapping."""
    import torch

    return tuple(
        torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device).copy_(
            each
        )
        for each in weights.values()
    )


@dataclass(frozen=True)
class Variant:
    """One way to compute a workload on torch tensors."""

    #: Launches the computation on the current stream: ``call(A, *tensors of a set)``, of a cascade
    #: ``call(*inputs)``, gives the output or outputs, which a later call may overwrite.
    call: Callable[..., Any]
    #: What is run, for the record.
    note: str = ""
    #: What ptxas said of each kernel of ours; empty for a baseline.
    resources: tuple[ResourceUsage, ...] = ()
    #: Makes of the weights by name the tensors of one set, as `call` takes them.
    pack: Callable[[Mapping[str, Any]], tuple[Any, ...]] = pack_apart
    #: Weights of its own, which `call` takes after all inputs.
    weights: tuple[Any, ...] = ()
    #: Whether it is launched one by one where no CUDA graph takes it.
    streams: bool = False


def no_such(name: str, spec: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a variant that a workload does not have, to be raised."""
    return refuse(WorkloadRefused, "bench", name, found=str(spec), limit=limit, instead=instead)
