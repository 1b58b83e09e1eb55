"""Workloads of several GPUs: row-parallel products, and collectives of the tensors of a group."""

from __future__ import annotations

from collections.abc import Callable
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


# Collectives: of each GPU's tensor all get the sum, or a slice of it, or the tensors themselves.

#: Element types that are summed and collected.
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
    _check_dtype("all-reduce", dtype)
    return _summed((ranks, elements), ranks, dtype, lambda rank, _, e: (rank, e))


@checked
def reduce_scatter(*, elements: AtLeastOne, ranks: AtLeastOne, dtype: str = "bfloat16") -> Any:
    """Make the function of a sum over GPUs of which each gets a slice, summed as by `all_reduce`.

    Parameters
    ----------
    elements : int
        Elements of a slice; each GPU's tensor has as many slices as there are GPUs.
    ranks : int
        GPUs.
    dtype : str
        Element type of operands and result: float16, bfloat16 or float32.

    Returns
    -------
    tvm.tirx.PrimFunc
        Of A [ranks, ranks, elements], by GPU and slice, and out [ranks, elements].

    Raises
    ------
    WorkloadRefused
        If the element type is another one.

    Examples
    --------
    >>> func = reduce_scatter(elements=4096, ranks=2)
    >>> [(str(each.name), [int(n) for n in each.ty.shape]) for each in func.params]
    [('A', [2, 2, 4096]), ('out', [2, 4096])]
    """
    _check_dtype("reduce-scatter", dtype)
    return _summed((ranks, ranks, elements), ranks, dtype, lambda rank, own, e: (rank, own, e))


def _summed(shape: tuple[int, ...], ranks: int, dtype: str, part: Callable[..., Any]) -> Any:
    """The function in which GPU g sums the parts of all ranks' tensors that `part` names."""
    from tvm import te

    given = te.placeholder(shape, dtype, "A")
    rank = te.reduce_axis((0, ranks), "r")

    def sums(g: Any, e: Any) -> Any:
        return te.sum(given[part(rank, g, e)].astype("float32"), [rank])

    total = te.compute((ranks, shape[-1]), sums, "total")
    result = te.compute((ranks, shape[-1]), lambda g, e: total[g, e].astype(dtype), "out")
    return te.create_prim_func([given, result])


@checked
def all_gather(*, elements: AtLeastOne, ranks: AtLeastOne, dtype: str = "bfloat16") -> Any:
    """Make the function by which each GPU gets the tensors of all.

    Parameters
    ----------
    elements : int
        Elements of each GPU's tensor, whatever its shape is.
    ranks : int
        GPUs.
    dtype : str
        Element type: float16, bfloat16 or float32.

    Returns
    -------
    tvm.tirx.PrimFunc
        Of A [ranks, elements] and out [ranks, ranks, elements], each slice of which is A.

    Raises
    ------
    WorkloadRefused
        If the element type is another one.

    Examples
    --------
    >>> func = all_gather(elements=4096, ranks=2)
    >>> [(str(each.name), [int(n) for n in each.ty.shape]) for each in func.params]
    [('A', [2, 4096]), ('out', [2, 2, 4096])]
    """
    from tvm import te

    _check_dtype("all-gather", dtype)
    given = te.placeholder((ranks, elements), dtype, "A")
    result = te.compute((ranks, ranks, elements), lambda g, r, e: given[r, e], "out")
    return te.create_prim_func([given, result])


@checked
def all_to_all(*, elements: AtLeastOne, ranks: AtLeastOne, dtype: str = "bfloat16") -> Any:
    """Make the function by which each GPU gets a slice of the tensor of each.

    Parameters
    ----------
    elements : int
        Elements of a slice; each GPU's tensor has as many slices as there are GPUs.
    ranks : int
        GPUs.
    dtype : str
        Element type: float16, bfloat16 or float32.

    Returns
    -------
    tvm.tirx.PrimFunc
        Of A [ranks, ranks, elements], by GPU and slice, and out of the same shape, in which both
        have changed places.

    Raises
    ------
    WorkloadRefused
        If the element type is another one.

    Examples
    --------
    >>> func = all_to_all(elements=4096, ranks=2)
    >>> [(str(each.name), [int(n) for n in each.ty.shape]) for each in func.params]
    [('A', [2, 2, 4096]), ('out', [2, 2, 4096])]
    """
    from tvm import te

    _check_dtype("all-to-all", dtype)
    given = te.placeholder((ranks, ranks, elements), dtype, "A")
    result = te.compute((ranks, ranks, elements), lambda g, r, e: given[r, g, e], "out")
    return te.create_prim_func([given, result])


def _check_dtype(what: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise refuse(
            WorkloadRefused,
            what,
            "tensors of GPUs",
            found=f"element type {dtype}",
            limit=", ".join(DTYPES),
            instead="convert the operands",
        )
