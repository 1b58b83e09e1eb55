"""Groups of bindings replaced by one call each."""

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
    """A call of a TensorIR function that computes the values of some bindings."""

    #: Its last parameter is the output.
    function: GlobalVar
    #: Variables or constants of the model; one may be a shape.
    inputs: tuple[Any, ...]
    #: Extents of the inputs in the function, of as many elements in the same order; symbolic ones
    #: may be among them. More elements where the function takes rows padded with zeros.
    shapes: tuple[tuple[Any, ...], ...]
    #: Extents of the function's output.
    shape: tuple[Any, ...]
    #: Element type of the output.
    dtype: str
    #: What became of each bin, if rows are symbolic.
    bins: tuple[BinOutcome, ...] = ()

    @property
    def result(self) -> Any:
        """Type of the function's result."""
        return relax.TensorType(self.shape, self.dtype)

    def call(self, given: Sequence[Any]) -> Any:
        """The call with tensors of the function's extents."""
        return relax.call_tir(self.function, list(given), out_ty=self.result)

    def reshaped(self, made: Any, extents: Sequence[Any]) -> Any:
        """The call's result in the extents that it has in the model."""
        return relax.op.reshape(made, extents)


class NamedCall(Replacement):
    """A call of an external function by its name, which looks at shapes itself."""

    def call(self, given: Sequence[Any]) -> Any:
        """See `Replacement.call`."""
        name = str(self.function.name_hint)
        return relax.call_dps_packed(name, relax.Tuple(list(given)), out_ty=self.result)

    def reshaped(self, made: Any, extents: Sequence[Any]) -> Any:
        """See `Replacement.reshaped`; a view, as TVM copies a reshape that a function returns."""
        return relax.op.memory.view(made, relax.ShapeExpr(extents))


class FunctionCall(Replacement):
    """A call of a Relax function."""

    def call(self, given: Sequence[Any]) -> Any:
        """See `Replacement.call`."""
        return Call(self.function, list(given))


def with_replacements(function: Any, replacements: Mapping[Var, Replacement]) -> Any:
    """A function that binds variables to calls instead of what they were bound to.

    What the replaced bindings alone read becomes dead code.
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
    """Bindings that make a variable by a call, between reshapes where extents differ in the model.

    Tensors whose rows are shorter in the model are padded with zeros; constants at compile time.
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
    """A value in the extents of the function's parameter; bindings for it are added to `made`."""
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
    """A variable bound, in `made`, to a call that transforms a value."""
    assert isinstance(call, Call)
    name = f"{getattr(value, 'name', 'constant')}_{what}"
    variable = relax.DataflowVar(name, relax.TensorType(shape, _dtype(value)))
    made.append(relax.VarBinding(variable, call))
    return variable


def _dtype(value: Any) -> str:
    return str(value.ty.dtype)


# Calls of a chain's kernel, whose arguments are found among the values of the model.


def call_of(
    kind: type[Replacement],
    function: GlobalVar,
    chain: PlannedChain,
    given: Sequence[Any],
    rows: Any = None,
) -> Replacement:
    """The call of a chain's kernel on given values, with symbolic rows if there are any."""
    outlined = chain.outlined
    values, shapes = [], []
    for each in outlined.arguments:
        value = value_of(each, given)
        values.append(value)
        shapes.append(_shape(value, each.shape, rows))
    output = (outlined.M if rows is None else rows, outlined.L)
    return kind(function, tuple(values), tuple(shapes), output, outlined.output_dtype)


def _shape(value: Any, shape: tuple[int, ...], rows: Any) -> tuple[Any, ...]:
    """The shape of a value in the kernel's parameters."""
    return shape if rows is None or not is_symbolic(value) else (rows, *shape[1:])


def value_of(argument: Argument, given: Sequence[Any]) -> Any:
    """The model's value that is an argument of a chain."""
    if argument.value is not None:
        return relax.const(argument.value, argument.dtype)
    return given[argument.position]


# Relax functions that choose the kernel of a bin by the number of rows of each call.

#: The most rows of a call that a function takes, None for all; and the function.
Leaf = tuple[int | None, GlobalVar]


def calling(function: Any, call: Replacement) -> Any:
    """A private function that computes a chain of symbolic rows by a call of its kernel.

    Reshapes in it are views, since they are in a dataflow block; memory that a branch of ``R.If``
    allocates itself TVM may reuse in the other branch.
    """
    result = relax.Var("result", function.ret_ty)
    body = relax.SeqExpr([relax.DataflowBlock(bindings(result, call))], result)
    return private(function, body)


def picking(function: Any, rows: Any, kernels: Mapping[int, GlobalVar], rest: GlobalVar) -> Any:
    """A private function that counts rows and calls one of several functions, by bisection.

    `kernels` are functions of the same parameters by the most rows that they take, few first;
    `rest` may be among them, where it is faster. It is called for more rows too, and for none.
    `rows` is an expression of symbols in the parameters' shapes.
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
    """A pure private function with the parameters and type of another, and variables of its own."""
    made = relax.Function(function.params, body, function.ret_ty, is_pure=True)
    return copy_with_new_vars(made)
