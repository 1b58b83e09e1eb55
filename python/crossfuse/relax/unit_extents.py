"""Functions of loops without extents of one: a batch of one sequence is a matrix of its rows."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir


def without_unit_extents(func: Any) -> Any:
    """The same function of tensors and loops without extents of one.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Of static shapes, in s_tir form, unscheduled.

    Returns
    -------
    tvm.tirx.PrimFunc
        Its tensors have the same elements in the same order. One of one element keeps its last
        extent. Indices are simple: a reshape to what is the same matrix then is a plain copy.
    """
    buffers = list(func.params)
    ir.walk(func.body, (ir.SBlock, lambda block: buffers.extend(block.alloc_buffers)))
    images = {
        each: ir.tirx.decl_buffer(_kept(each, each.ty.shape), each.ty.dtype, str(each.name))
        for each in buffers
    }
    first, known = _unit_variables(func)

    def simple(indices: Any, buffer: Any) -> list[Any]:
        return [known.simplify(each) for each in _kept(buffer, indices)]

    def value(var: Any, _mutator: Any) -> Any:
        return first.get(var, var)

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return images[node.source][tuple(simple(node.indices, node.source))]

    def store(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return ir.BufferStore(images[node.buffer], node.value, simple(node.indices, node.buffer))

    def loop(node: Any, mutator: Any) -> Any:
        if node.loop_var not in first:
            return mutator.default_mutate(node)
        return mutator.mutate(node.body)

    def realize(node: Any, mutator: Any) -> Any:
        block = node.block
        pairs = zip(block.iter_vars, node.iter_values, strict=True)
        kept = [(each, at) for each, at in pairs if each.var not in first]

        def regions(given: Any) -> list[Any]:
            ranges = [[mutator.mutate(r) for r in _kept(e.source, e.region)] for e in given]
            pairs = zip(given, ranges, strict=True)
            return [ir.tirx.BufferRegion(images[each.source], place) for each, place in pairs]

        made = ir.block_like(
            block,
            iter_vars=[each for each, _ in kept],
            reads=regions(block.reads),
            writes=regions(block.writes),
            alloc_buffers=[images[each] for each in block.alloc_buffers],
            init=None if block.init is None else mutator.mutate(block.init),
            body=mutator.mutate(block.body),
        )
        return ir.SBlockRealize([mutator.mutate(at) for _, at in kept], node.predicate, made)

    body = ir.mutate(
        func.body,
        (ir.Var, value),
        (ir.TensorLoad, load),
        (ir.BufferStore, store),
        (ir.For, loop),
        (ir.SBlockRealize, realize),
    )
    return ir.PrimFunc([images[each] for each in func.params], body, func.ret_type, func.attrs)


def _kept(buffer: Any, values: Any) -> list[Any]:
    """Of a value for each extent those of extents beyond one."""
    pairs = list(zip(buffer.ty.shape, values, strict=True))
    return [value for extent, value in pairs if int(extent) != 1] or [pairs[-1][1]]


def _unit_variables(func: Any) -> tuple[dict[Any, Any], Any]:
    """Variables of loops and blocks that have one value, with it; and what is known of all."""
    found: dict[Any, Any] = {}
    known = ir.sym.Analyzer()

    def block(node: Any) -> None:
        for each in node.iter_vars:
            known.bind(each.var, each.dom)
            if ir.constant(each.dom.extent) == 1:
                found[each.var] = each.dom.min

    def loop(node: Any) -> None:
        if ir.constant(node.extent) == 1:
            found[node.loop_var] = node.min

    ir.walk(func.body, (ir.SBlock, block), (ir.For, loop))
    return found, known
