"""Vectors that TVM's CUDA code generator has no type for."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import evaluated, sites

#: Indices of one vector: eight of int32 become a ``longlong4`` that the generator fills with
#: eight arguments, which does not compile.
MAX_INDICES = 4


def check_vectors(func: Any) -> None:
    """No access computes more indices of its own than CUDA has a vector for.

    A contiguous access of any width has one index, its first; a vectorised loop that runs over
    the end of a row has one for each element.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A function whose loops are vectorised.

    Raises
    ------
    LoweringRefused
        Naming the statement.
    """
    for site in sites(func.body):
        for expression in evaluated(site.node):
            lanes = _index_lanes(expression)
            if lanes > MAX_INDICES:
                raise refuse(
                    "vectors",
                    f"statement {site.text}",
                    found=f"a vector of {lanes} computed indices",
                    limit=f"{MAX_INDICES} indices of int32 in a vector of CUDA",
                    instead=f"vectorise by {MAX_INDICES} or less, or by a number of elements that "
                    "divides the rows that are copied",
                )


def _index_lanes(expression: Any) -> int:
    """Lanes of the widest vector of equal integers, which arithmetic on indices is made with."""
    found = [0]

    def visit(broadcast: Any) -> None:
        if str(broadcast.value.ty) in ("int32", "uint32"):
            found.append(int(broadcast.lanes))

    ir.walk(expression, (ir.tirx.Broadcast, visit))
    return max(found)
