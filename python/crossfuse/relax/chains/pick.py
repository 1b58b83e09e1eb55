"""Functions of Relax that run the kernel of a bin: chosen by the rows of each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, GlobalVar
from tvm.relax.utils import copy_with_new_vars

from crossfuse.relax.chains.replace import Replacement, bindings

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
