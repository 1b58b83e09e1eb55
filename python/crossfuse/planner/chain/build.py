"""Chains from workload specs, and of any length from extents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from crossfuse.calls import checked
from crossfuse.planner.chain.layers import Further, Layer, Operand, assemble
from crossfuse.planner.chain.refusal import refused
from crossfuse.planner.chain.spec import Chain
from crossfuse.workload.conv_chain import ConvChainSpec
from crossfuse.workload.dtypes import float_type
from crossfuse.workload.epilogue import affine, further_operands
from crossfuse.workload.spec import WorkloadSpec

_NOTHING: Mapping[int, Sequence[Further]] = MappingProxyType({})


@checked
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
        further=_further(spec),
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
    further: Mapping[int, Sequence[Further]] = _NOTHING,
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
    further : Mapping[int, Sequence[Further]]
        What products read besides, by their index.

    Returns
    -------
    Chain
        With the names of `crossfuse.planner.chain.layers`.

    Raises
    ------
    PlanRefused
        No product, weights in a batch without a batch, further inputs of a product that there is
        not, or extents that are not positive.
    """
    if len(widths) < 2:
        raise refused(
            "widths",
            f"{len(widths)} widths",
            "two for the first product, and one for each after it",
            "write the columns of every left operand and of the output",
        )
    if batched_weights and not batch:
        limit = "weights for each matrix of a batch"
        raise refused("batched_weights", "no batch dim", limit, "write batch=1, say")
    outside = [index for index in further if not 0 <= index < len(widths) - 1]
    if outside:
        limit = f"0 to {len(widths) - 2}, for one of the products"
        raise refused("further", f"product {outside[0]}", limit, "count products from 0")
    weight, last = Operand(item, batched=batched_weights), len(widths) - 2
    layers = [
        Layer(
            width,
            (weight, weight) if gated and not index else (weight,),
            (out or item) if index == last else item,
            tuple(further.get(index, ())),
        )
        for index, width in enumerate(widths[1:])
    ]
    return assemble(rows, widths[0], Operand(item, repeats), layers, batch=batch)


def _further(spec: WorkloadSpec) -> dict[int, list[Further]]:
    """Scales, biases and the residual of a workload by product, as its function takes them."""
    last = 1 if spec.L else 0
    found: dict[int, list[Further]] = {0: [], last: []}
    for product in spec.products:
        scale, bias = affine(spec, product)
        place = last if product == spec.products[-1] else 0
        names = {scale: (), bias: ("column",)}
        for operand in further_operands(spec):
            if operand.name in names:
                size = float_type(operand.dtype).size
                found[place].append(Further(names[operand.name], size))
    if spec.residual:
        *_, residual = further_operands(spec)
        found[last].append(Further(("row", "column"), float_type(residual.dtype).size))
    return found
