"""One way to compute a workload, and the refusal of a way that there is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.errors import RefusedError, WorkloadRefused, refuse

if TYPE_CHECKING:
    from crossfuse.runtime.resources import ResourceUsage


@dataclass(frozen=True)
class Variant:
    """One way to compute a workload on torch tensors."""

    #: Makes of the weights by name the tensors of one set, as `call` takes them.
    pack: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    #: Launches the computation on the current stream: ``call(A, *tensors of a set)`` gives the
    #: output, which a later call may overwrite.
    call: Callable[..., Any]
    #: What is run, for the record.
    note: str = ""
    #: What ptxas said of each kernel of ours; empty for a baseline.
    resources: tuple[ResourceUsage, ...] = ()

    def bind(self, a: Any, weights: tuple[Any, ...]) -> Callable[[], Any]:
        """The computation on one set of weights."""
        return lambda: self.call(a, *weights)


def pack_apart(weights: Mapping[str, Any]) -> tuple[Any, ...]:
    """Copy every weight as it is, in the order of the mapping."""
    return tuple(each.clone() for each in weights.values())


def no_such(name: str, spec: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a variant that a workload does not have, to be raised."""
    return refuse(WorkloadRefused, "bench", name, found=str(spec), limit=limit, instead=instead)
