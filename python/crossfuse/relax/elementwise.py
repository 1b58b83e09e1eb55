"""Everything between two matrix products as one float32 expression.

The operators are rebuilt over matrices of collapsed rows and in float32, legalised by TVM, and
inlined into one block whose expression is then read off. What the model rounds in between is not
rounded here: the expression starts from float32 sums and is rounded once, by whoever stores it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import s_tir, te, tirx
from tvm.ir import TensorLoad, Var
from tvm.s_tir import SBlock
from tvm_ffi import structural_map, structural_walk

from crossfuse.relax.graph import Graph
from crossfuse.relax.operators import dtype_of, refused, scalar, shape_of
from crossfuse.relax.rebuild import Leaf, check_reshape, collapse, rebuild
from crossfuse.workload.build import Elementwise
from crossfuse.workload.dtypes import FLOAT_TYPES, Operand

_MOST_LOADS = 4096


@dataclass(frozen=True)
class Region:
    """Element-wise operators that make one value, as an expression of some leaves."""

    #: Makes the float32 expression at a place, from the tensors by the leaves' names.
    function: Elementwise
    #: All tensors that it reads, products included.
    leaves: tuple[Leaf, ...]
    #: The expression as a person would write it.
    text: str


def read_region(
    graph: Graph, target: Any, named: Mapping[Any, str], products: tuple[Var, ...], rows: int
) -> Region:
    """Turn the operators that make a value into one expression.

    `target` is a matrix [rows, columns] once its leading extents are collapsed, `products` are
    leaves in float32, `named` names all leaves but numbers. Refused are broadcasts over part of the
    rows, reshapes that mix rows and columns, operands of unsupported types, and expressions too
    large to repeat.
    """
    inner, found = graph.reach(target, products)
    leaves = tuple(
        _leaf(value, named[value], value in products, rows)
        for value in found
        if scalar(value) is None
    )
    if not inner:
        (leaf,) = leaves
        return Region(_load(leaf.operand.name), leaves, f"{leaf.operand.name}[i, j]")
    for value in inner:
        check_reshape(graph, value, rows)
    shape = collapse(shape_of(target, graph.operator(target)), rows, "the result")
    function = rebuild(graph, inner, leaves, rows, shape)
    _check_size(function)
    block = _one_block(function)
    # The last parameter is the output.
    names = {p: leaf.operand.name for p, leaf in zip(function.params[:-1], leaves, strict=True)}
    _check_loads(
        block, {n for n, leaf in zip(names, leaves, strict=True) if leaf.value in products}
    )
    return Region(_Expression(block, names), leaves, _text(block))


def _text(block: Any) -> str:
    """The expression as a person would write it: without types and casts."""
    text = str(block.body.value)
    for axis, letter in zip(block.iter_vars, "ij", strict=True):
        text = text.replace(axis.var.name, letter)
    text = re.sub(r"T\.int64\((\d+)\)", r"\1", text)
    text = re.sub(r"T\.float32\(([-+.e\d]+)\)", lambda m: f"{float(m[1]):.7g}", text)
    text = re.sub(r"T\.Cast\(\"float32\", (\w+\[[^]]*\])\)", r"\1", text)
    return text.replace("T.", "")


def _load(name: str) -> Elementwise:
    return lambda tensors, i, j: tensors[name](i, j)


@dataclass(frozen=True)
class _Expression:
    """The expression of a block, to be evaluated on other tensors and axes."""

    block: Any
    names: Mapping[Any, str]

    def __call__(self, tensors: Mapping[str, te.Tensor], i: Any, j: Any) -> Any:
        rows, columns = (axis.var for axis in self.block.iter_vars)

        def moved(index: Any) -> Any:
            return i if index.same_as(rows) else j if index.same_as(columns) else 0

        def load(node: Any) -> Any:
            return tensors[self.names[node.source]](*map(moved, node.indices))

        return structural_map(self.block.body.value, (TensorLoad, load))


def _leaf(value: Any, name: str, product: bool, rows: int) -> Leaf:
    dtype = "float32" if product else dtype_of(value)
    if dtype not in FLOAT_TYPES:
        limit = "element-wise operands of " + ", ".join(FLOAT_TYPES)
        raise refused(name, dtype, limit, "convert the operand to one of these")
    return Leaf(value, Operand(name, collapse(shape_of(value, name), rows, name), dtype))


def _one_block(function: tirx.PrimFunc) -> Any:
    """Inline every block into the one that writes the output."""
    schedule = s_tir.Schedule(function)
    (last,) = schedule.get_output_blocks("root")
    kept = schedule.get(last).name_hint
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        if schedule.get(block).name_hint != kept:
            schedule.compute_inline(block)
    return schedule.get(last)


def _check_size(function: tirx.PrimFunc) -> None:
    """Refuse an expression that inlining makes too large.

    Inlining repeats an expression wherever it is used, so its size is known only by counting.
    """
    loads: dict[Any, int] = {}
    blocks: list[Any] = []
    structural_walk(function, (SBlock, blocks.append))
    for block in blocks:
        if isinstance(block.body, tirx.BufferStore):
            found: list[Any] = []
            structural_walk(block.body.value, (TensorLoad, found.append))
            total = sum(loads.get(load.source, 1) for load in found)
            loads[block.body.buffer] = total
            if total > _MOST_LOADS:
                what = f"an expression that repeats its operands {total} times or more"
                limit = f"{_MOST_LOADS} repetitions"
                raise refused("main", what, limit, "leave the model unfused")


def _check_loads(block: Any, whole: set[Any]) -> None:
    """Refuse a product read elsewhere than at the written place, whatever the legaliser did."""
    axes = [axis.var for axis in block.iter_vars]
    loads: list[Any] = []
    structural_walk(block.body.value, (TensorLoad, loads.append))
    for load in loads:
        pairs = zip(load.indices, axes, strict=False)
        if load.source in whole and not all(index.same_as(axis) for index, axis in pairs):
            found, limit = "a product read at another place", "element-wise operators"
            raise refused(load.source.name, found, limit, "leave the model unfused")
