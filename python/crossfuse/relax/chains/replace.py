"""Groups of bindings replaced by calls of one function each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, GlobalVar, Var
from tvm.relax.utils import copy_with_new_vars

from crossfuse.relax.chains.outcome import BinOutcome
from crossfuse.relax.chains.planned import PlannedChain
from crossfuse.relax.chains.symbols import extents_of, is_symbolic, same_extents
from crossfuse.relax.operators import is_tensor
from crossfuse.relax.outline import Argument
from crossfuse.workload.dtypes import zeros_behind


@dataclass(frozen=True)
class Replacement:
    """A call that computes what some bindings did.

    Attributes
    ----------
    function : GlobalVar
        The function of TensorIR; its last parameter is the output.
    inputs : tuple
        Its inputs, variables or constants of the model; one may be a shape.
    shapes : tuple[tuple[Any, ...], ...]
        Extents that the function knows them by, of as many elements in the same order; symbolic
        ones may be among them. Of more elements where it takes rows with zeros behind them.
    shape : tuple[Any, ...]
        Extents of the function's output.
    dtype : str
        Element type of the output.
    bins : tuple[BinOutcome, ...]
        Of symbolic rows what becomes of them in each bin.
    """

    function: GlobalVar
    inputs: tuple[Any, ...]
    shapes: tuple[tuple[Any, ...], ...]
    shape: tuple[Any, ...]
    dtype: str
    bins: tuple[BinOutcome, ...] = ()

    @property
    def result(self) -> Any:
        """Type of what the function makes."""
        return relax.TensorType(self.shape, self.dtype)

    def call(self, given: Sequence[Any]) -> Any:
        """The call, of tensors of the function's extents."""
        return relax.call_tir(self.function, list(given), out_ty=self.result)

    def reshaped(self, made: Any, extents: Sequence[Any]) -> Any:
        """What the call made, in the extents that it has in the model."""
        return relax.op.reshape(made, extents)


class NamedCall(Replacement):
    """A call of an external function of the name, which looks at shapes itself."""

    def call(self, given: Sequence[Any]) -> Any:
        """See `Replacement.call`."""
        name = str(self.function.name_hint)
        return relax.call_dps_packed(name, relax.Tuple(list(given)), out_ty=self.result)

    def reshaped(self, made: Any, extents: Sequence[Any]) -> Any:
        """See `Replacement.reshaped`. TVM copies a reshape that is a function's result."""
        return relax.op.memory.view(made, relax.ShapeExpr(extents))


class FunctionCall(Replacement):
    """A call of a function of Relax."""

    def call(self, given: Sequence[Any]) -> Any:
        """See `Replacement.call`."""
        return Call(self.function, list(given))


def with_replacements(function: Any, replacements: Mapping[Var, Replacement]) -> Any:
    """Bind variables to calls instead of what they are bound to.

    Parameters
    ----------
    function : relax.Function
        A model's function. What its replaced bindings alone read becomes dead code.
    replacements : Mapping[Var, Replacement]
        By the variable whose value the call makes.

    Returns
    -------
    relax.Function
        A new function.
    """
    blocks = []
    for block in function.body.blocks:
        made: list[Any] = []
        for binding in block.bindings:
            found = replacements.get(binding.var)
            made += [binding] if found is None else bindings(binding.var, found)
        blocks.append(type(block)(made))
    body = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(
        function.params, body, function.ret_ty, function.is_pure, function.attrs, function.span
    )


def bindings(variable: Var, found: Replacement) -> list[Any]:
    """What makes a variable: a call, between reshapes where tensors have other extents there.

    Tensors whose rows are shorter there get zeros, constants at once.

    Parameters
    ----------
    variable : Var
        The variable.
    found : Replacement
        The call.

    Returns
    -------
    list[relax.Binding]
        In order.
    """
    made: list[Any] = []
    given = [
        _given(each, shape, made) for each, shape in zip(found.inputs, found.shapes, strict=True)
    ]
    call = found.call(given)
    due = extents_of(variable)
    if not same_extents(due, found.shape):
        flat = relax.DataflowVar(f"{variable.name}_rows", found.result)
        made.append(relax.VarBinding(flat, call))
        call = found.reshaped(flat, due)
    return [*made, relax.VarBinding(variable, call)]


def _given(value: Any, shape: Sequence[Any], made: list[Any]) -> Any:
    """A value in the extents that a function knows it by; what makes it so is added to `made`."""
    if not is_tensor(value) or same_extents(extents_of(value), shape):
        return value
    zeros = 0 if is_symbolic(value) else zeros_behind(shape, prod(map(int, extents_of(value))))
    short = (*shape[:-1], shape[-1] - zeros) if zeros else shape
    behind = [(0, 0)] * (len(shape) - 1) + [(0, zeros)]
    if zeros and isinstance(value, GenericConst):
        return relax.const(np.pad(value.value.numpy().reshape(short), behind), _dtype(value))
    if not same_extents(extents_of(value), short):
        value = _bound("rows", relax.op.reshape(value, short), value, short, made)
    if zeros:
        value = _bound("padded", relax.op.nn.pad(value, [*sum(behind, ())]), value, shape, made)
    return value


def _bound(what: str, call: Any, value: Any, shape: Sequence[Any], made: list[Any]) -> Any:
    """A variable for what a call makes of a value."""
    assert isinstance(call, Call)
    name = f"{getattr(value, 'name', 'constant')}_{what}"
    variable = relax.DataflowVar(name, relax.TensorType(shape, _dtype(value)))
    made.append(relax.VarBinding(variable, call))
    return variable


def _dtype(value: Any) -> str:
    return str(value.ty.dtype)


# Calls of the kernel of a chain: values of the model by what the kernel reads.


def call_of(
    kind: type[Replacement],
    function: GlobalVar,
    chain: PlannedChain,
    given: Sequence[Any],
    rows: Any = None,
) -> Replacement:
    """The call of a kernel of a chain, with values for what it reads; of symbolic rows if given."""
    outlined = chain.outlined
    values, shapes = [], []
    for each in outlined.arguments:
        value = value_of(each, given)
        values.append(value)
        shapes.append(_shape(value, each.shape, rows))
    output = (outlined.M if rows is None else rows, outlined.L)
    return kind(function, tuple(values), tuple(shapes), output, outlined.output_dtype)


def _shape(value: Any, shape: tuple[int, ...], rows: Any) -> tuple[Any, ...]:
    """The shape that a kernel knows a value by."""
    return shape if rows is None or not is_symbolic(value) else (rows, *shape[1:])


def value_of(argument: Argument, given: Sequence[Any]) -> Any:
    """The value of a model that is an input of a chain."""
    if argument.value is not None:
        return relax.const(argument.value, argument.dtype)
    return given[argument.position]


# Functions of Relax that run the kernel of a bin: chosen by the rows of each call.

#: A function, and the rows of a call that it takes at most; None for all.
Leaf = tuple[int | None, GlobalVar]


def calling(function: Any, call: Replacement) -> Any:
    """A function as another one, which calls a kernel for its result.

    Parameters
    ----------
    function : relax.Function
        A chain alone, of symbolic rows.
    call : Replacement
        The call, of the function's parameters.

    Returns
    -------
    relax.Function
        Private. Reshapes in it are views, since they are in a dataflow block; what a branch of
        ``R.If`` allocates itself TVM may use again in the other branch.
    """
    result = relax.Var("result", function.ret_ty)
    body = relax.SeqExpr([relax.DataflowBlock(bindings(result, call))], result)
    return private(function, body)


def picking(function: Any, rows: Any, kernels: Mapping[int, GlobalVar], rest: GlobalVar) -> Any:
    """A function that counts rows and calls one of others, by halves.

    Parameters
    ----------
    function : relax.Function
        What it computes.
    rows : tvm.ir.Expr
        Number of rows, of symbols in the parameters' shapes.
    kernels : Mapping[int, GlobalVar]
        Functions of the same parameters by the rows that they take at most, few first; the `rest`
        among them, where that is faster.
    rest : GlobalVar
        What is called for more rows, and for none.

    Returns
    -------
    relax.Function
        Private.
    """
    leaves: list[Leaf] = [(0, rest)]
    for most, callee in [*kernels.items(), (None, rest)]:
        if callee.same_as(leaves[-1][1]):
            leaves.pop()
        leaves.append((most, callee))
    return private(function, _tree(function, rows, leaves))


def _tree(function: Any, rows: Any, leaves: Sequence[Leaf]) -> Any:
    result = relax.Var("result", function.ret_ty)
    if len(leaves) == 1:
        made = [relax.VarBinding(result, Call(leaves[0][1], list(function.params)))]
        return relax.SeqExpr([relax.BindingBlock(made)], result)
    half = len(leaves) // 2
    few = relax.Var("few", tvm.ir.PrimType("bool"))
    branches = (_tree(function, rows, each) for each in (leaves[:half], leaves[half:]))
    made = [
        relax.VarBinding(few, rows <= leaves[half - 1][0]),
        relax.VarBinding(result, relax.If(few, *branches)),
    ]
    return relax.SeqExpr([relax.BindingBlock(made)], result)


def private(function: Any, body: Any) -> Any:
    """A pure function of the same parameters that the module alone calls.

    Parameters
    ----------
    function : relax.Function
        Whose parameters and type it has.
    body : relax.SeqExpr
        What it computes.

    Returns
    -------
    relax.Function
        With variables of its own.
    """
    made = relax.Function(function.params, body, function.ret_ty, is_pure=True)
    return copy_with_new_vars(made)
