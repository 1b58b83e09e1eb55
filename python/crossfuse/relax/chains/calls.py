"""Calls of a chain's kernels, and the functions that pick the kernel of a bin of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import tvm
from tvm import relax
from tvm.ir import Call, GlobalVar, Var
from tvm.relax.utils import copy_with_new_vars

from crossfuse.relax.chains.planned import PlannedChain
from crossfuse.relax.outline import Argument
from crossfuse.relax.replace import Replacement
from crossfuse.relax.symbols import is_symbolic


class NamedCall(Replacement):
    """A call of an external function by its name, which looks at shapes itself."""

    def call(self, given: Sequence[Any]) -> Any:
        """See `Replacement.call`."""
        name = str(self.function.name_hint)
        return relax.call_dps_packed(name, relax.Tuple(list(given)), out_ty=self.out_ty)

    def reshaped(self, made: Any, extents: Sequence[Any]) -> Any:
        """See `Replacement.reshaped`; a view, as TVM copies a reshape that a function returns."""
        return relax.op.memory.view(made, relax.ShapeExpr(extents))


class FunctionCall(Replacement):
    """A call of a Relax function."""

    def call(self, given: Sequence[Any]) -> Any:
        """See `Replacement.call`."""
        return Call(self.function, list(given))


Kind = TypeVar("Kind", bound=Replacement)


def call_of(
    kind: type[Kind],
    function: GlobalVar,
    chain: PlannedChain,
    given: Sequence[Any],
    output: Var,
    rows: Any = None,
) -> Kind:
    """The call of a chain's kernel on given values, with symbolic rows if there are any."""
    outlined = chain.outlined
    values = tuple(value_of(each, given) for each in outlined.arguments)
    pairs = zip(values, outlined.arguments, strict=True)
    shapes = tuple(_shape(value, each.shape, rows) for value, each in pairs)
    made = (outlined.M if rows is None else rows, outlined.L)
    result = relax.TensorType(made, outlined.output_dtype)
    return kind(function, values, shapes, (output,), (result,))


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


def calling(function: Any, kernel: GlobalVar, chain: PlannedChain, rows: Any) -> Any:
    """A private function that computes a chain of symbolic rows by a call of its kernel.

    Reshapes in it are views, since they are in a dataflow block; memory that a branch of ``R.If``
    allocates itself TVM may reuse in the other branch.
    """
    result = relax.Var("result", function.ret_ty)
    call = call_of(NamedCall, kernel, chain, function.params, result, rows)
    return private(function, relax.SeqExpr([relax.DataflowBlock(call.bindings)], result))


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
