"""Chains from workload specs, and of any length from extents."""

from __future__ import annotations

from collections.abc import Sequence

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import Chain, Dim, Product, Tensor
from crossfuse.workload.conv_chain import ConvChainSpec
from crossfuse.workload.dtypes import float_type
from crossfuse.workload.spec import WorkloadSpec


def chain_of(spec: WorkloadSpec) -> Chain:
    """Make the chain of a workload.

    Parameters
    ----------
    spec : WorkloadSpec
        A product, a chain of two, a gated FFN, or two convolutions. The first convolution is the
        product of its windows, k1 * k1 * IC elements a row, and its weights.

    Returns
    -------
    Chain
        Over dims m, n, k, and l where there is a second product.

    Examples
    --------
    >>> from crossfuse.workload import parse
    >>> chain = chain_of(parse("gemm_chain:M=128,K=768,N=3072,L=768"))
    >>> [(each.name, each.dims) for each in chain.tensors]
    [('A', ('m', 'k')), ('B', ('n', 'k')), ('C', ('m', 'n')), ('D', ('l', 'n')), ('E', ('m', 'l'))]
    """
    widths = [spec.K, spec.N, spec.L] if spec.L else [spec.K, spec.N]
    return matrix_chain(
        spec.M,
        widths,
        gated=spec.gated,
        item=float_type(spec.dtype).size,
        out=float_type(spec.out).size,
        repeats=spec.k1 * spec.k1 if isinstance(spec, ConvChainSpec) else 1,
    )


def matrix_chain(
    rows: int,
    widths: Sequence[int],
    *,
    batch: int = 0,
    batched_weights: bool = False,
    gated: bool = False,
    item: int = 2,
    out: int = 0,
    repeats: int = 1,
) -> Chain:
    """Make a chain of products of any length.

    Parameters
    ----------
    rows : int
        Rows of all left operands.
    widths : Sequence[int]
        Columns of the first left operand, then of what each product makes.
    batch : int
        Matrices in a batch; 0 for no batch dim.
    batched_weights : bool
        Whether each matrix of the batch has weights of its own.
    gated : bool
        Whether the first product has two weights.
    item, out : int
        Bytes of an element, and of one of the output where that differs.
    repeats : int
        See `Tensor`, of the first left operand.

    Returns
    -------
    Chain
        Dims m, n, k and l; from three products on m, k, n0, n1 and so on. Tensors A to E; from
        three products on A, B0, C0, B1, C1 and so on.

    Raises
    ------
    PlanRefused
        No product, weights in a batch without a batch, or extents that are not positive.
    """
    count = len(widths) - 1
    if count < 1:
        raise refuse(
            PlanRefused,
            "chain",
            "widths",
            found=f"{len(widths)} widths",
            limit="two for the first product, and one for each after it",
            instead="write the columns of every left operand and of the output",
        )
    if batched_weights and not batch:
        raise refuse(
            PlanRefused,
            "chain",
            "batched_weights",
            found="no batch dim",
            limit="weights for each matrix of a batch",
            instead="write batch=1, say",
        )
    names = ["k", *(("n", "l")[:count] if count < 3 else [f"n{each}" for each in range(count)])]
    lead = ("b",) if batch else ()
    shared = lead if batched_weights else ()
    dims = [*(Dim(each, batch) for each in lead), Dim("m", rows)]
    dims += [Dim(name, width) for name, width in zip(names, widths, strict=True)]
    tensors = [Tensor("A", (*lead, "m", "k"), item, "input", repeats)]
    products: list[Product] = []
    for index in range(count):
        summed, column, last = names[index], names[index + 1], index == count - 1
        right, result = _names(index, count)
        rights = (f"{right}_gate", f"{right}_up") if gated and not index else (right,)
        tensors += [Tensor(each, (*shared, column, summed), item, "input") for each in rights]
        role, size = ("output", out or item) if last else ("intermediate", item)
        left = products[-1].output if products else "A"
        tensors.append(Tensor(result, (*lead, "m", column), size, role))
        products.append(Product(result, left, rights, summed))
    return Chain(tuple(dims), tuple(tensors), tuple(products))


def _names(index: int, count: int) -> tuple[str, str]:
    """Names of the weights and of the result of a product."""
    if count < 3:
        return (("B", "C"), ("D", "E"))[index]
    return f"B{index}", f"C{index}"
