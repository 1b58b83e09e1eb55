"""Kernels of products of symbolic rows, with what makes these rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import relax
from tvm.ir import Var

from crossfuse import _tvm as ir
from crossfuse.blocks.facts import is_reduction
from crossfuse.cascade.algebra import derive
from crossfuse.lower.refusal import refusals
from crossfuse.planner.cascade.plan import CascadePlan, ranked_cascade
from crossfuse.planner.cascade.shape import cascade_shape
from crossfuse.planner.families import EAGER, ROWS
from crossfuse.relax.attention import ATTENTION
from crossfuse.relax.calls import Flow, read_flow
from crossfuse.relax.chains.kernels import ChainKernels
from crossfuse.relax.chains.symbols import at_sizes, is_symbolic, symbols_of, value_at
from crossfuse.relax.dataflow import read_dataflow
from crossfuse.relax.gather import GATHER
from crossfuse.relax.merge import merged
from crossfuse.relax.operators import PRODUCT, refused
from crossfuse.relax.outline import Argument, Outlined
from crossfuse.relax.row_wise import check_row_wise
from crossfuse.relax.unit_extents import without_unit_extents
from crossfuse.relax.wide_arithmetic import WideArithmetic
from crossfuse.schedule.cascades import only_site, schedule_cascade_of

#: What symbols are at least where rows are followed, each another power of two.
_LEAST = 16
_INSTEAD = "leave the model unfused, or give it one number of rows"


@dataclass(frozen=True)
class OutlinedRows(Outlined):
    """Rows and their product as one function.

    The extents are those of the product: M, K and L, which is N too.
    """

    @property
    def kind(self) -> str:
        """What functions of it are called."""
        return "rows_gemm"


class RowsKernels(ChainKernels):
    """Kernels of products that make their rows; see `ChainKernels`."""

    def outlined(self, static: Any) -> OutlinedRows:
        """See `ChainKernels.outlined`; refused is what is no cascade of rows before a product."""
        with refusals("rows before a product"):
            whole, inputs, params = _loops(static)
            func = _inlined(without_unit_extents(whole))
        arguments = tuple(map(partial(_argument, params), inputs, func.params))
        return _outlined(func, arguments, _depth(static["main"]))

    def check_rows(self, function: Any, rows: Any) -> None:
        """See `ChainKernels.check_rows`; not all that makes rows goes along them."""
        super().check_rows(function, rows)
        sizes = {each: _LEAST << at for at, each in enumerate(symbols_of(function))}
        with refusals("rows before a product"):
            func, inputs, params = _loops(at_sizes(function, sizes))
        given = [
            each in params and is_symbolic(function.params[params.index(each)]) for each in inputs
        ]
        check_row_wise(func, given, value_at(rows, sizes))

    def ranked(self, func: Any) -> Sequence[CascadePlan]:
        """See `ChainKernels.ranked`. Chunks of rows have kernels for all rows only."""
        site = only_site(func)
        shape = cascade_shape(site, derive(site.cascade), "rows before a product")
        if shape.product is None:
            limit = (
                "a norm or a quantiser of rows, and one product of them and weights, of 2 bytes an "
                "element or 1"
            )
            raise refused("main", "reductions, and a product of another form", limit, _INSTEAD)
        plans = ranked_cascade(shape, self.target, only=(ROWS, EAGER))
        return [each for each in plans if not each.tiles.get("chunk")]

    def read_plan(self, text: str) -> CascadePlan:
        """See `ChainKernels.read_plan`."""
        return CascadePlan.from_json(text)

    def scheduled(self, func: Any, plan: Any) -> Any:
        """See `ChainKernels.scheduled`."""
        return schedule_cascade_of(func, ROWS, plan.tiles, constant_weights=self._constant)


def _loops(static: Any) -> tuple[Any, tuple[Any, ...], list[Var]]:
    """A module's function as one of loops, what that reads, and the parameters of the module's."""
    legalize = relax.transform.LegalizeOps({**ATTENTION, **GATHER})
    passes = [WideArithmetic(), relax.transform.CanonicalizeBindings(), legalize]
    mod = ir.tvm.ir.transform.Sequential(passes)(static)
    flow = _flow(mod)
    func = ir.narrow(merged(mod, flow, flow.nodes))
    return func, flow.inputs(flow.nodes), list(mod["main"].params)


def _inlined(func: Any) -> Any:
    """A function with one block behind its product, and none that only moves what it is given.

    So weights are read where they are, and the epilogue is one expression.
    """
    schedule = ir.Schedule(func)
    blocks: list[Any] = []
    ir.walk(func.body.block.body, (ir.SBlock, blocks.append))
    behind = max((at for at, each in enumerate(blocks) if _sums(each)), default=0)
    for at, each in enumerate(blocks):
        if not isinstance(each.body, ir.BufferStore) or _sums(each):
            continue
        value = each.body.value
        moves = isinstance(value, ir.TensorLoad) and value.source in func.params
        if (moves or at > behind) and each.body.buffer not in func.params:
            schedule.compute_inline(schedule.get_sblock(str(each.name_hint)))
    (made,) = schedule.mod.functions.values()
    return made


def _sums(block: Any) -> bool:
    return any(is_reduction(each) for each in block.iter_vars)


def _flow(mod: Any) -> Flow:
    """The calls of a function of one block; each can be merged with the others."""
    (block,) = mod["main"].body.blocks
    flow = read_flow(mod, block)
    odd = next((each for each in flow.nodes if each.reason), None)
    if odd is not None:
        raise refused(odd.name, odd.reason, "operators that become functions of loops", _INSTEAD)
    return flow


def _argument(params: Sequence[Var], value: Any, buffer: Any) -> Argument:
    """Where an input comes from, and what the function of loops knows it as."""
    shape, dtype = tuple(int(each) for each in buffer.ty.shape), str(buffer.ty.dtype)
    if not isinstance(value, Var):
        return Argument("constant", "", -1, shape, dtype, value.value.numpy())
    return Argument(str(value.name), str(value.name), params.index(value), shape, dtype)


def _outlined(func: Any, arguments: tuple[Argument, ...], depth: int) -> OutlinedRows:
    output = func.params[-1].ty
    shape = tuple(int(each) for each in output.shape)
    if len(shape) != 2:
        found = f"a result of shape {list(shape)}, its rows in one extent"
        raise refused("main", found, "a matrix of rows", _INSTEAD)
    dtype, (rows, columns) = str(output.dtype), shape
    fields = (rows, depth, columns, columns, False, dtype, shape, dtype, "", "")
    return OutlinedRows(func, arguments, *fields)


def _depth(function: Any) -> int:
    """What the product of a function sums."""
    dataflow = read_dataflow(function)
    (product,) = (each for each in dataflow.values if dataflow.operator(each) == PRODUCT)
    return int(dataflow.arguments(product)[0].ty.shape.values[-1])
