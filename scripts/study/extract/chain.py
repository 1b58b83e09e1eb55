"""The chain that a function computes, found by what its blocks read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crossfuse.planner.chain.build import Layer, Operand, assemble
from crossfuse.planner.chain.spec import Chain

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from study.extract.parts import Parts
    from study.extract.product import Stage
    from study.extract.reads import Program


def chain_from(func: PrimFunc) -> Chain:
    """Extract the chain of products that an unscheduled function computes, or refuse it.

    Names, the order of blocks and equal extents mean nothing: what reads what, and through which
    affine indices, says which loops are rows, columns and sums. Element-wise blocks and reshapes
    are looked through. Rows that share all weights become one dim, so that the chain equals
    `crossfuse.planner.chain.build.chain_of` of the function's spec. Reductions that are no products
    are in `Chain.reductions`. Shapes must be constant; refusals name block and buffer.

    Examples
    --------
    >>> from crossfuse.workload import parse, prim_func
    >>> chain = chain_from(prim_func(parse("gemm_chain:M=128,K=768,N=3072,L=768")))
    >>> [(each.name, each.dims) for each in chain.tensors]
    [('A', ('m', 'k')), ('B', ('n', 'k')), ('C', ('m', 'n')), ('D', ('l', 'n')), ('E', ('m', 'l'))]
    """
    from crossfuse.blocks.access import extent_of
    from study.extract.parts import (
        Parts,
        batch_of,
        find_reductions,
        read_program,
        row_parts,
    )
    from study.extract.product import find_stages

    program = read_program(func)
    stages = find_stages(program)
    rows = row_parts(stages)
    batched = [(each, batch_of(each)) for each in stages if batch_of(each)]
    batch = 0
    if batched:
        stage, matrices = batched[0]
        batch = extent_of(matrices, stage.domain)
    parts = [Parts(stage, tags, batch) for stage, tags in zip(stages, rows, strict=True)]
    at_first, at_stages = find_reductions(program, parts)
    layers = [
        _layer(program, part, reduced) for part, reduced in zip(parts, at_stages, strict=True)
    ]
    first = parts[0]
    left = Operand(*first.operand(first.stage.splits[0].main, ("batch", "row", "summed")))
    depth = first.sizes["summed"]
    return assemble(
        first.sizes["row"],
        depth,
        left,
        layers,
        batch=batch,
        reduced=[each.reduced for each in at_first],
    )


def _layer(program: Any, part: Parts, reduced: Any) -> Layer:
    weights = []
    for each in part.stage.splits:
        own = bool(part.batch_variables)
        followed = ("batch", "column", "summed") if own else ("column", "summed")
        weights.append(Operand(*part.operand(each.weight, followed), batched=own))
    further = part.further(program, [reads for each in reduced for reads in each.besides])
    return Layer(
        part.sizes["column"],
        tuple(weights),
        part.stage.reader.item,
        tuple(further),
        tuple(each.reduced for each in reduced),
        _functions(program, part.stage),
    )


def _functions(program: Program, stage: Stage) -> int:
    """Cycles of the functions of a product's results, wherever blocks apply them."""
    from crossfuse.blocks.chain import function_cycles
    from study.extract.product import products

    results = {each.buffer for each in stage.blocks}
    readers = (
        each
        for each in program.blocks.values()
        if results & {read.buffer for read in products(program, program.reads(each))}
    )
    return sum(function_cycles(each.value) for each in readers)
