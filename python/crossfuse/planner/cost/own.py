"""Terms that users add to the estimate, for what their own use of kernels costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.cost.terms import CASCADE_TERMS, TERMS
from crossfuse.planner.kernels.shape import Share

if TYPE_CHECKING:
    from crossfuse.hardware import Device


@dataclass(frozen=True)
class OwnTerm:
    """A term that is added to the time of every kernel of a chain or cascade, and of not fusing.

    What was learned from measured kernels knows nothing of it: it says what measurements did not
    have, such as gaps between launches.

    Parameters
    ----------
    name : str
        As explanations show it; none of the estimate's own.
    time : Callable
        Microseconds of (kernel, shape, device): a number, or an array with an entry for each of
        many kernels, whose fields are arrays then. The kernel is None for separate kernels of a
        library, see `crossfuse.planner.families.EAGER`. Of a cascade kernel and shape are
        `crossfuse.planner.families.cascade.CascadeKernel` and
        `crossfuse.planner.cascade.shape.CascadeShape`. Whichever it is, ``kernel.family`` is its
        family, ``len(kernel.kernels(shape))`` its launches, and ``shape.separate`` those of
        separate kernels.

    Raises
    ------
    PlanRefused
        If the estimate has a term of that name.

    Examples
    --------
    >>> from dataclasses import replace
    >>> import crossfuse
    >>> from crossfuse.hardware import device
    >>> from crossfuse.planner.cost.rates import rates_of
    >>> def gap(kernel, shape, device):
    ...     return 3.0 * (shape.separate if kernel is None else len(kernel.kernels(shape)))
    >>> rates = replace(rates_of(device("nvidia-h100")), own=(OwnTerm("gap", gap),))
    >>> crossfuse.plan("G1", rates=rates).terms["gap"]
    3.0
    >>> crossfuse.plan("R7", rates=rates).terms["gap"]
    3.0
    """

    name: str
    time: Callable[[Any, Any, Device], Share]

    def __post_init__(self) -> None:
        if self.name in (*TERMS, *CASCADE_TERMS):
            raise refuse(
                PlanRefused,
                "own-term",
                f"term '{self.name}'",
                found="the name of a term of the estimate",
                limit="a name of its own, since both are added",
                instead="take another name; to change the estimate's own term, change its rates",
            )
