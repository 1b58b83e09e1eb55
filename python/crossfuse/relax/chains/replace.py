"""Groups of bindings replaced by calls of one function each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.ir import Call, GlobalVar, Var

from crossfuse.relax.operators import shape_of


@dataclass(frozen=True)
class Replacement:
    """A call that computes what some bindings did.

    Attributes
    ----------
    function : GlobalVar
        The function of TensorIR; its last parameter is the output.
    inputs : tuple
        Its inputs, variables or constants of the model.
    shapes : tuple[tuple[int, ...], ...]
        Extents that the function knows them by, of as many elements in the same order.
    shape : tuple[int, ...]
        Extents of the function's output.
    dtype : str
        Element type of the output.
    """

    function: GlobalVar
    inputs: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    dtype: str


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
        bindings: list[Any] = []
        for binding in block.bindings:
            found = replacements.get(binding.var)
            bindings += [binding] if found is None else _bindings(binding.var, found)
        blocks.append(type(block)(bindings))
    body = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(
        function.params, body, function.ret_ty, function.is_pure, function.attrs, function.span
    )


def _bindings(variable: Var, found: Replacement) -> list[Any]:
    """A call, between reshapes where the function knows its tensors by other extents."""
    made: list[Any] = []
    given = [
        _reshaped(each, shape, made) for each, shape in zip(found.inputs, found.shapes, strict=True)
    ]
    result = relax.TensorType(found.shape, found.dtype)
    call = relax.call_tir(found.function, given, out_ty=result)
    due = shape_of(variable, variable.name)
    if due != found.shape:
        flat = relax.DataflowVar(f"{variable.name}_rows", result)
        made.append(relax.VarBinding(flat, call))
        call = relax.op.reshape(flat, due)
    return [*made, relax.VarBinding(variable, call)]


def _reshaped(value: Any, shape: Sequence[int], made: list[Any]) -> Any:
    if shape_of(value, "an input") == tuple(shape):
        return value
    dtype = str(value.ty.dtype)
    flat = relax.DataflowVar(
        f"{getattr(value, 'name', 'constant')}_rows", relax.TensorType(shape, dtype)
    )
    call = relax.op.reshape(value, shape)
    assert isinstance(call, Call)
    made.append(relax.VarBinding(flat, call))
    return flat
