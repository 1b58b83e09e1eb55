"""Chains with their plans, of static and of symbolic rows, and the calls of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tvm
from tvm import relax
from tvm.ir import Call, GlobalVar, Var
from tvm.relax.utils import copy_with_new_vars

from crossfuse.errors import RefusedError
from crossfuse.planner.families import EAGER
from crossfuse.relax.chains.kinds import GroupKind
from crossfuse.relax.choice import PlannedGroup
from crossfuse.relax.operators import refused
from crossfuse.relax.outcome import BinOutcome
from crossfuse.relax.outline import Argument, Outlined
from crossfuse.relax.replace import Replacement
from crossfuse.relax.symbols import (
    at_sizes,
    check_rows,
    cut,
    is_symbolic,
    rows_of,
    sizes_for,
    text_of,
)


@dataclass(frozen=True)
class PlannedChain(PlannedGroup):
    """A group that is a chain, or of another kind, with its plans."""

    #: The chain as one function.
    outlined: Outlined
    #: How that is planned and scheduled.
    kind: GroupKind

    @property
    def name(self) -> str:
        """Name of its kernels."""
        return f"crossfuse_{self.outlined.kind}"

    def call(self, function: GlobalVar) -> Replacement:
        """The call of its kernel, of static shapes."""
        return call_of(Replacement, function, self, self.given, self.output)


@dataclass(frozen=True)
class PlannedBin:
    """A chain of symbolic rows in one bin."""

    #: The most rows of a call.
    rows: int
    #: The chain at that many rows; None if the group is none.
    chain: PlannedChain | None
    #: Why it is none.
    text: str = ""

    def outcome(self, always: bool, name: str = "", text: str = "") -> BinOutcome:
        """Its outcome, with the name of its kernel or the reason why it has none."""
        if self.chain is None:
            return BinOutcome(self.rows, "", "", None, None, self.text)
        left = self.chain.left(always)
        family, text = EAGER if left else self.chain.family, text or left
        times, words = self.chain.times, self.chain.words
        return BinOutcome(self.rows, name, family, *times, text, words)


@dataclass(frozen=True)
class PlannedRows(PlannedChain):
    """A group whose number of rows is symbolic; as a chain, that of the bin that saves most."""

    #: The group alone, a Relax function; its parameters are in the order of `given`.
    function: Any
    #: Number of rows, an expression of symbols that the parameters' shapes define.
    rows: Any
    #: Few rows first; at least one has a chain.
    bins: tuple[PlannedBin, ...]

    @property
    def words(self) -> str:
        """Nothing: each bin reports its own measurements."""
        return ""


#: Plans a group of static shapes, a module of its own, at some sizes of its symbols.
Planner = Callable[[Any, Mapping[Var, int]], PlannedChain]


def plan_rows(
    output: Var, function: Any, most: int | None, bins: Sequence[int], plan: Planner
) -> PlannedRows:
    """Plan a group of symbolic rows, each bin at its most rows; those without a chain say why.

    `function` is the group alone, `plan` plans it at static shapes; no call has more than `most`
    rows. Refused are tensors with symbols besides a number of rows; if no bin has a chain, the
    reason is that of the first.
    """
    rows = rows_of(output)
    found: dict[int, PlannedBin] = {}
    refusals: list[RefusedError] = []
    for count in cut(bins, most):
        sizes = sizes_for(rows, count)
        if not sizes:
            continue
        try:
            chain = plan(at_sizes(function, sizes), sizes)
            _check(chain, output, rows)
            found[chain.outlined.M] = PlannedBin(chain.outlined.M, chain)
        except RefusedError as error:
            refusals.append(error)
            found.setdefault(count, PlannedBin(count, None, str(error)))
    every = tuple(found[each] for each in sorted(found))
    chains = [each.chain for each in every if each.chain is not None]
    if not chains:
        raise next(iter(refusals), _no_bin(rows, bins))
    best = max(chains, key=lambda each: each.gain)
    summary = f"of {text_of(rows)} rows, as {best.summary}"
    as_best = {**vars(best), "summary": summary}
    return PlannedRows(**as_best, function=function, rows=rows, bins=every)


def _no_bin(rows: Any, bins: Sequence[int]) -> RefusedError:
    return refused(
        "bins",
        f"{text_of(rows)} rows, the fewest of which are too many for a bin",
        f"bins of {', '.join(map(str, bins))} rows",
        "add a bin of more rows",
    )


def _check(chain: PlannedChain, output: Var, rows: Any) -> None:
    """Refuse a chain with symbols that are more than a number of rows."""
    for each in chain.outlined.arguments:
        if each.value is None:
            check_rows(chain.given[each.position], each.shape, rows)
    check_rows(output, (chain.outlined.M, chain.outlined.L), rows)


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
    made = outlined.made if rows is None else (rows, outlined.L)
    result = relax.TensorType(made, outlined.output_dtype)
    return kind(function, values, shapes, (output,), (result,))


def _shape(value: Any, shape: tuple[int, ...], rows: Any) -> tuple[Any, ...]:
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
