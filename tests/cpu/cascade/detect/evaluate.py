"""What a site says, computed in float64: symbols, stages and outputs, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import sympy
import tvm

from crossfuse import _tvm as ir
from crossfuse.blocks.read import Block
from crossfuse.cascade.detect.program import Program, read_program
from crossfuse.cascade.spec import OutputSite, Site, Stage

Arrays = Mapping[Any, np.ndarray]
_REDUCE = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}


def assert_same(site: Site, inputs: Mapping[str, np.ndarray], rtol: float = 1e-4) -> None:
    """The outputs of a site are those that LLVM computes of the function."""
    due = run(site.function, inputs)
    found = outputs_of(site, inputs)
    assert found
    for name, array in found.items():
        np.testing.assert_allclose(
            array, due[name].astype(np.float64), rtol=rtol, atol=rtol, err_msg=name
        )


def run(func: Any, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What LLVM computes; vectorised bfloat16 products are wrong from level 2 on."""
    named = func.with_attr("global_symbol", "main")
    built = tvm.compile(named, target={"kind": "llvm", "opt-level": 1})
    buffers = [each for each in func.params if ir.is_buffer_var(each)]
    arguments, outputs = [], {}
    for each in buffers:
        name = str(each.name)
        if name in inputs:
            arguments.append(tvm.runtime.tensor(inputs[name]))
        else:
            shape = [int(extent) for extent in each.ty.shape]
            arguments.append(tvm.runtime.empty(shape, str(each.ty.dtype)))
            outputs[name] = arguments[-1]
    built(*arguments)
    return {name: array.numpy() for name, array in outputs.items()}


def outputs_of(site: Site, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a site, by name."""
    program = read_program(site.function)
    arrays = {each: inputs[str(each.name)].astype(np.float64) for each in program.inputs}
    for name in set(site.producers.values()):
        block = next(each for each in program.reductions if each.name == name)
        arrays[block.buffer] = _produced(program, block, arrays)
    return {each.name: _Evaluation(site, arrays, each).output() for each in site.outputs}


def _produced(program: Program, block: Block, arrays: Arrays) -> np.ndarray:
    grid = _grid({**block.domain})
    value = _value(program.value(block), grid, arrays)
    value = np.broadcast_to(value, tuple(block.domain.values()))
    axes = tuple(place for place, var in enumerate(block.domain) if var in block.summed)
    return _REDUCE[block.combine](value, axis=axes)


class _Evaluation:
    def __init__(self, site: Site, arrays: Arrays, wanted: OutputSite) -> None:
        self.site, self.wanted = site, wanted
        self.grid = _grid(site.extents)
        self.places = {var: place for place, var in enumerate(site.extents)}
        self.values = {
            symbol: _value(read, self.grid, arrays) for symbol, read in site.reads.items()
        }
        for stage in site.cascade.stages:
            self._reduce(stage)

    def output(self) -> np.ndarray:
        name, cascade = self.wanted.name, self.site.cascade
        along = name in cascade.rows
        assert along != (name in cascade.results)
        value = self._number((cascade.rows if along else cascade.results)[name])
        indices = [_value(each, self.grid, {}) for each in self.wanted.indices]
        found = np.full([int(each) for each in self.wanted.buffer.ty.shape], np.nan)
        found[np.broadcast_arrays(*indices, value)[:-1]] = np.broadcast_arrays(*indices, value)[-1]
        assert not along or self.site.axis in {v for i in self.wanted.indices for v in _vars(i)}
        return found

    def _number(self, expression: sympy.Expr) -> np.ndarray:
        symbols = sorted(expression.free_symbols, key=str)
        unknown = [each for each in symbols if each not in self.values]
        assert not unknown, unknown
        function = sympy.lambdify(symbols, expression, ["scipy", "numpy"])
        with np.errstate(all="ignore"):
            return np.asarray(function(*(self.values[each] for each in symbols)), np.float64)

    def _reduce(self, stage: Stage) -> None:
        axis = self.places[self.site.axis]
        shape = [1] * len(self.places)
        shape[axis] = self.site.extents[self.site.axis]
        term = self._number(stage.term)
        term = np.broadcast_to(term, np.broadcast_shapes(term.shape, tuple(shape)))
        kind = stage.monoid.name
        if kind in _REDUCE:
            self.values[stage.symbol] = _REDUCE[kind](term, axis=axis, keepdims=True)
            return
        order = np.argsort(term if kind == "argmin" else -term, axis=axis, kind="stable")
        kept = np.take(order, np.arange(max(stage.monoid.k, 1)), axis=axis)
        values = np.take_along_axis(term, kept, axis=axis)
        if stage.monoid.k and self.wanted.columns:
            place = self.places[self.wanted.columns[-1]]
            kept, values = (np.swapaxes(each, axis, place) for each in (kept, values))
        self.values[stage.symbol], self.values[stage.index_symbol] = values, kept


def _grid(extents: Mapping[Any, int]) -> dict[Any, np.ndarray]:
    """Each variable's values along a dimension of its own."""
    found = {}
    for place, (var, extent) in enumerate(extents.items()):
        shape = [1] * len(extents)
        shape[place] = extent
        found[var] = np.arange(extent).reshape(shape)
    return found


def _vars(expression: Any) -> list[Any]:
    return list(ir.variables(expression))


def _value(node: Any, grid: Arrays, arrays: Arrays) -> np.ndarray:
    """An expression of loads and integer arithmetic."""
    if isinstance(node, ir.Var):
        return grid[node]
    if isinstance(node, ir.tirx.IntImm | ir.tirx.FloatImm):
        return np.asarray(node.value)
    if isinstance(node, ir.TensorLoad):
        indices = [_value(each, grid, arrays).astype(np.int64) for each in node.indices]
        return arrays[node.source][tuple(np.broadcast_arrays(*indices))]
    if isinstance(node, ir.tirx.Cast):
        return _value(node.value, grid, arrays)
    operators = {
        ir.tirx.Add: np.add,
        ir.tirx.Sub: np.subtract,
        ir.tirx.Mul: np.multiply,
        ir.tirx.FloorDiv: np.floor_divide,
        ir.tirx.FloorMod: np.mod,
    }
    return operators[type(node)](_value(node.a, grid, arrays), _value(node.b, grid, arrays))


def names(site: Site) -> list[str]:
    """Of a site's stages, in order."""
    return [each.name for each in site.cascade.stages]
