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
    return _Rewriter(func).function()


class _Rewriter:
    """The tensors of a function as they are without extents of one, and what reads them."""

    def __init__(self, func: Any) -> None:
        self.func = func
        buffers = list(func.params)
        ir.walk(func.body, (ir.SBlock, lambda block: buffers.extend(block.alloc_buffers)))
        self.images = {
            each: ir.tirx.decl_buffer(_kept(each, each.ty.shape), each.ty.dtype, str(each.name))
            for each in buffers
        }
        self.first, self.known = _unit_variables(func)

    def function(self) -> Any:
        """The function of the images."""
        func = self.func
        body = ir.mutate(
            func.body,
            (ir.Var, self._value),
            (ir.TensorLoad, self._load),
            (ir.BufferStore, self._store),
            (ir.For, self._loop),
            (ir.SBlockRealize, self._realize),
        )
        params = [self.images[each] for each in func.params]
        return ir.PrimFunc(params, body, func.ret_type, func.attrs)

    def _value(self, var: Any, _mutator: Any) -> Any:
        return self.first.get(var, var)

    def _load(self, node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return self.images[node.source][tuple(self._simple(node.indices, node.source))]

    def _store(self, node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        indices = self._simple(node.indices, node.buffer)
        return ir.BufferStore(self.images[node.buffer], node.value, indices)

    def _loop(self, node: Any, mutator: Any) -> Any:
        if node.loop_var not in self.first:
            return mutator.default_mutate(node)
        return mutator.mutate(node.body)

    def _realize(self, node: Any, mutator: Any) -> Any:
        block = node.block
        pairs = zip(block.iter_vars, node.iter_values, strict=True)
        kept = [(each, at) for each, at in pairs if each.var not in self.first]
        made = ir.block_like(
            block,
            iter_vars=[each for each, _ in kept],
            reads=self._regions(block.reads, mutator),
            writes=self._regions(block.writes, mutator),
            alloc_buffers=[self.images[each] for each in block.alloc_buffers],
            init=None if block.init is None else mutator.mutate(block.init),
            body=mutator.mutate(block.body),
        )
        return ir.SBlockRealize([mutator.mutate(at) for _, at in kept], node.predicate, made)

    def _regions(self, given: Any, mutator: Any) -> list[Any]:
        ranges = [[mutator.mutate(r) for r in _kept(e.source, e.region)] for e in given]
        pairs = zip(given, ranges, strict=True)
        return [ir.tirx.BufferRegion(self.images[each.source], place) for each, place in pairs]

    def _simple(self, indices: Any, buffer: Any) -> list[Any]:
        return [self.known.simplify(each) for each in _kept(buffer, indices)]


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
