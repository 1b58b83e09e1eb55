"""The sum of the tensors of all GPUs of a group, of which each gets all."""

from __future__ import annotations

from typing import Any

from crossfuse.calls import AtLeastOne, checked
from crossfuse.errors import WorkloadRefused, refuse

#: Element types that are summed.
DTYPES = ("float16", "bfloat16", "float32")


@checked
def all_reduce(*, elements: AtLeastOne, ranks: AtLeastOne, dtype: str = "bfloat16") -> Any:
    """Make the function of a sum over GPUs: in float32, in the order of ranks, rounded once.

    Parameters
    ----------
    elements : int
        Elements of each GPU's tensor, whatever its shape is.
    ranks : int
        GPUs.
    dtype : str
        Element type of operands and result: float16, bfloat16 or float32.

    Returns
    -------
    tvm.tirx.PrimFunc
        Of A [ranks, elements] and out [ranks, elements], each slice of which is the same sum.

    Raises
    ------
    WorkloadRefused
        If the element type is another one.

    Examples
    --------
    >>> func = all_reduce(elements=4096, ranks=2)
    >>> [(str(each.name), [int(n) for n in each.ty.shape]) for each in func.params]
    [('A', [2, 4096]), ('out', [2, 4096])]
    """
    from tvm import te

    if dtype not in DTYPES:
        raise refuse(
            WorkloadRefused,
            "all-reduce",
            "sum over GPUs",
            found=f"element type {dtype}",
            limit=", ".join(DTYPES),
            instead="convert the operands",
        )
    given = te.placeholder((ranks, elements), dtype, "A")
    rank = te.reduce_axis((0, ranks), "r")
    total = te.compute(
        (ranks, elements), lambda g, e: te.sum(given[rank, e].astype("float32"), [rank]), "total"
    )
    result = te.compute((ranks, elements), lambda g, e: total[g, e].astype(dtype), "out")
    return te.create_prim_func([given, result])
