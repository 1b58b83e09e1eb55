"""Parts of a tensor, as the operators that TVM joins with what reads them: slices."""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx

from crossfuse.relax.graph import Graph, Node, read_graph, with_bindings

_SPLIT = "relax.split"


def with_slices(mod: Any) -> Any:
    """A module with slices for the parts of ``split``, whose extents are known.

    A tuple is read element by element: what makes it is a kernel of its own, and joins none. The
    module is one that `crossfuse.relax.graph.clean` has normalised, which removes splits that
    nothing reads any more.
    """
    made = mod.clone()
    for name, function in mod.functions_items():
        if isinstance(function, relax.Function) and isinstance(function.body, relax.SeqExpr):
            made.update_func(name, _sliced(function))
    return made


def _sliced(function: Any) -> Any:
    graph = read_graph(function)
    slices = {node.var: each for node in graph.nodes if (each := _slice(graph, node)) is not None}
    if not slices:
        return function

    def changed(block: Any) -> list[Any]:
        return [
            relax.VarBinding(each.var, slices[each.var]) if each.var in slices else each
            for each in block.bindings
        ]

    return with_bindings(function, changed)


def _slice(graph: Graph, node: Node) -> Any:
    """The slice that a node takes out of a split; None if it is another node."""
    if not node.is_element or graph.operator(node.value.tuple_value) != _SPLIT:
        return None
    split = graph.makers[node.value.tuple_value].value
    axis = int(split.attrs.axis) % len(split.args[0].ty.shape.values)
    extents = [each.shape.values[axis] for each in split.ty.fields]
    if not all(isinstance(each, tirx.IntImm) for each in extents):
        return None
    widths, place = [int(each) for each in extents], int(node.value.index)
    begin = sum(widths[:place])
    made = relax.op.strided_slice(split.args[0], [axis], [begin], [begin + widths[place]])
    return relax.BlockBuilder().normalize(made)
