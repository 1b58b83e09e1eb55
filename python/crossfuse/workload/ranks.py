"""Workloads of several GPUs: row-parallel products, and sums of the tensors of a group."""

from __future__ import annotations

from typing import Any

from crossfuse.calls import AtLeastOne, checked
from crossfuse.errors import WorkloadRefused, refuse

_DTYPES = ("float16", "bfloat16", "float32")


@checked
def row_parallel(
    *, m: AtLeastOne, k: AtLeastOne, n: AtLeastOne, ranks: AtLeastOne, dtype: str = "float16"
) -> Any:
    """Make the function of a product that several GPUs share, of which each gets all of the result.

    Each GPU has some columns of the left operand and as many rows of the right one; their products
    are summed in float32 (Megatron-LM, arXiv:1909.08053, row-parallel linear layer with an
    all-reduce).

    Parameters
    ----------
    m, k, n : int
        Rows and columns of the result, and what is summed over, of all GPUs together.
    ranks : int
        GPUs; a divisor of k.
    dtype : str
        Element type of operands and result: float16, bfloat16 or float32.

    Returns
    -------
    tvm.tirx.PrimFunc
        Of A [ranks, m, k / ranks], B [ranks, k / ranks, n] and out [m, n].

    Raises
    ------
    WorkloadRefused
        If the GPUs do not divide k, or the element type is another one.

    Examples
    --------
    >>> func = row_parallel(m=16, k=128, n=32, ranks=2)
    >>> [(str(each.name), [int(n) for n in each.ty.shape]) for each in func.params]
    [('A', [2, 16, 64]), ('B', [2, 64, 32]), ('out', [16, 32])]
    """
    from tvm import te

    if k % ranks:
        raise _refuse(f"k = {k} for {ranks} GPUs", "a multiple of the number of GPUs")
    if dtype not in _DTYPES:
        raise _refuse(f"element type {dtype}", ", ".join(_DTYPES))
    left = te.placeholder((ranks, m, k // ranks), dtype, "A")
    right = te.placeholder((ranks, k // ranks, n), dtype, "B")
    rank, depth = te.reduce_axis((0, ranks), "g"), te.reduce_axis((0, k // ranks), "k")

    def term(i: Any, j: Any) -> Any:
        factors = (left[rank, i, depth], right[rank, depth, j])
        one, other = (each.astype("float32") for each in factors)
        return te.sum(one * other, [rank, depth])

    product = te.compute((m, n), term, "product")
    result = te.compute((m, n), lambda i, j: product[i, j].astype(dtype), "out")
    return te.create_prim_func([left, right, result])


def _refuse(found: str, limit: str) -> Exception:
    return refuse(
        WorkloadRefused,
        "row-parallel",
        "product",
        found=found,
        limit=limit,
        instead="choose other extents, or pad the operands with zeros",
    )


# The sum, of which each GPU gets all.

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
