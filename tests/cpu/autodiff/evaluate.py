"""Runs functions of plain blocks in torch, so that its autograd differentiates them too.

It compiles nothing: a block is one expression over arrays of indices. A load out of bounds is an
error unless a choice keeps it from being made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from crossfuse import _tvm as ir
from crossfuse.blocks.read import Block, read_blocks

Arrays = dict[str, torch.Tensor]


def run(func: Any, arrays: Mapping[str, torch.Tensor]) -> Arrays:
    """What a function stores to its parameters, by name."""
    values = {each: arrays[str(each.name)] for each in func.params if str(each.name) in arrays}
    blocks = read_blocks(func)
    for block in blocks:
        values[block.buffer] = _computed(block, values)
    outputs = [each for each in func.params if str(each.name) not in arrays]
    return {str(each.name): values[each] for each in outputs}


def _computed(block: Block, values: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    variables = (*block.coordinates, *block.summed)
    extents = [block.domain[each] for each in variables]
    grid = {}
    for at, (variable, extent) in enumerate(zip(variables, extents, strict=True)):
        around = [1] * len(extents)
        around[at] = extent
        grid[variable] = torch.arange(extent).reshape(around)
    always = torch.ones((1,) * len(extents), dtype=torch.bool)
    found = _Evaluator(grid, values).of(block.value, always)
    found = torch.broadcast_to(found, extents).to(_dtype(block.buffer.ty.dtype))
    if not block.summed:
        return found
    found = found.reshape([block.domain[each] for each in block.coordinates] + [-1])
    return _REDUCTIONS[block.combine](found)


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "product": lambda x: x.prod(-1),
    "max": lambda x: x.amax(-1),
    "min": lambda x: x.amin(-1),
}


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, str(name))
    assert isinstance(found, torch.dtype)
    return found


class _Evaluator:
    def __init__(self, grid: Mapping[Any, torch.Tensor], values: Mapping[Any, torch.Tensor]):
        self.grid, self.values = grid, values

    def of(self, node: Any, mask: torch.Tensor) -> torch.Tensor:
        """An expression where the mask is true; elsewhere anything."""
        if isinstance(node, (ir.tirx.IntImm, ir.tirx.FloatImm)):
            return torch.tensor(node.value, dtype=_dtype(node.ty))
        if isinstance(node, ir.TensorLoad):
            return self._load(node, mask)
        if isinstance(node, ir.Var):
            return self.grid[node]
        if isinstance(node, ir.tirx.Cast):
            return self.of(node.value, mask).to(_dtype(node.ty))
        if isinstance(node, ir.tirx.Select):
            return torch.where(
                *(self.of(e, mask) for e in (node.condition, node.true_value, node.false_value))
            )
        if isinstance(node, ir.tirx.Not):
            return ~self.of(node.a, mask)
        if isinstance(node, ir.Call):
            return self._call(node, mask)
        one, other = self.of(node.a, mask), self.of(node.b, mask)
        if "int" in str(node.a.ty) and type(node) in _OF_INTEGERS:
            return _OF_INTEGERS[type(node)](one, other)
        return _OPERATORS[type(node)](one, other)

    def _load(self, node: Any, mask: torch.Tensor) -> torch.Tensor:
        source = self.values[node.source]
        places = []
        for index, extent in zip(node.indices, source.shape, strict=True):
            place = self.of(index, mask)
            inside = (place >= 0) & (place < extent)
            assert bool((inside | ~mask).all()), f"{node} leaves its buffer"
            places.append(place.clamp(0, extent - 1))
        return source[tuple(places)] if places else source

    def _call(self, node: Any, mask: torch.Tensor) -> torch.Tensor:
        name = str(node.op.name).rpartition(".")[2]
        if str(node.op.name) == ir.IF_THEN_ELSE:
            condition = self.of(node.args[0], mask)
            sides = (
                self.of(node.args[1], mask & condition),
                self.of(node.args[2], mask & ~condition),
            )
            return torch.where(condition, *sides)
        arguments = [self.of(each, mask) for each in node.args]
        return _FUNCTIONS.get(name, getattr(torch, name, None))(*arguments)  # type: ignore[misc]


_OPERATORS: dict[Any, Any] = {
    ir.tirx.Add: torch.add,
    ir.tirx.Sub: torch.sub,
    ir.tirx.Mul: torch.mul,
    ir.tirx.Div: torch.div,
    ir.tirx.Max: torch.maximum,
    ir.tirx.Min: torch.minimum,
    ir.tirx.FloorMod: torch.remainder,
    ir.tirx.Mod: torch.fmod,
    ir.tirx.FloorDiv: lambda a, b: torch.div(a, b, rounding_mode="floor"),
    ir.tirx.EQ: torch.eq,
    ir.tirx.NE: torch.ne,
    ir.tirx.LT: torch.lt,
    ir.tirx.LE: torch.le,
    ir.tirx.GT: torch.gt,
    ir.tirx.GE: torch.ge,
    ir.tirx.And: torch.logical_and,
    ir.tirx.Or: torch.logical_or,
}
_OF_INTEGERS: dict[Any, Any] = {
    ir.tirx.Div: lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}
_FUNCTIONS: dict[str, Any] = {
    "fabs": torch.abs,
    "exp10": lambda x: torch.pow(10.0, x),
    "nearbyint": torch.round,
    "bitwise_and": torch.bitwise_and,
    # Unlike torch's own, of two that are equally near the one farther from 0.
    "round": lambda x: torch.sign(x) * torch.floor(torch.abs(x) + 0.5),
}
