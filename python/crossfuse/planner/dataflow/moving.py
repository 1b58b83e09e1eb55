"""Tensors that loops move, each with its loops, and what they write."""

from __future__ import annotations

from dataclasses import replace

from crossfuse.planner.chain.spec import Chain, Tensor
from crossfuse.planner.counts import Count, choose
from crossfuse.planner.dataflow.footprint import ACCUMULATOR
from crossfuse.planner.dataflow.volume import Nest, elements_moved


def operands(chain: Chain, made: tuple[Nest, ...]) -> list[tuple[Nest, Tensor]]:
    """Operands of products, intermediates too."""
    return [
        (nest, chain.tensor(name))
        for nest, product in zip(made, chain.products, strict=True)
        for name in (product.left, *product.rights)
    ]


def further(chain: Chain, made: tuple[Nest, ...]) -> list[tuple[Nest, Tensor]]:
    """Further inputs, with the loops that read them."""
    return [
        (replace(nest, own=chain.further_loops(index, name)), chain.tensor(name))
        for index, (nest, product) in enumerate(zip(made, chain.products, strict=True))
        for name in product.further
    ]


def inputs(chain: Chain, made: tuple[Nest, ...]) -> list[tuple[Nest, Tensor]]:
    """All that no product of the chain makes."""
    given = [each for each in operands(chain, made) if each[1].role == "input"]
    return [*given, *further(chain, made)]


def written_bytes(chain: Chain, nest: Nest, hold: int, adds: bool) -> Count:
    """Bytes of the output: whole sums as stored, partial ones in full and as often as they come."""
    tensor = chain.output
    elements = elements_moved(nest, tensor.dims, hold)
    partial = elements * ACCUMULATOR
    if not adds:
        again = elements - elements_moved(nest, tensor.dims, hold, first=True)
        partial = partial + again * ACCUMULATOR
    return choose(elements > chain.elements(tensor.name), partial, elements * tensor.item)
