"""One way to compute a workload, and the refusal where there is no such way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.errors import RefusedError, WorkloadRefused, refuse

if TYPE_CHECKING:
    from crossfuse.runtime.resources import ResourceUsage


@dataclass(frozen=True)
class Variant:
    """One way to compute a workload.

    Attributes
    ----------
    pack : Callable
        Makes of the weights by name the tensors of one set, as `call` takes them.
    call : Callable
        Launches the computation on the current stream: ``call(A, *tensors of a set)`` gives the
        output, which a later call may overwrite.
    note : str
        What is run, for the record.
    resources : tuple[ResourceUsage, ...]
        What ptxas said of each kernel of ours; nothing of a baseline.
    """

    pack: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    call: Callable[..., Any]
    note: str = ""
    resources: tuple[ResourceUsage, ...] = ()

    def bind(self, a: Any, weights: tuple[Any, ...]) -> Callable[[], Any]:
        """The computation on one set of weights."""
        return lambda: self.call(a, *weights)


def pack_apart(weights: Mapping[str, Any]) -> tuple[Any, ...]:
    """Copy every weight as it is.

    Parameters
    ----------
    weights : Mapping[str, torch.Tensor]
        By name.

    Returns
    -------
    tuple[torch.Tensor, ...]
        In the same order.
    """
    return tuple(each.clone() for each in weights.values())


def no_such(name: str, spec: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a variant that a workload does not have.

    Parameters
    ----------
    name : str
        The variant.
    spec : object
        The workload, whose text the message has.
    limit, instead : str
        See `crossfuse.errors.Refusal`.

    Returns
    -------
    RefusedError
        To be raised.
    """
    return refuse(WorkloadRefused, "bench", name, found=str(spec), limit=limit, instead=instead)
