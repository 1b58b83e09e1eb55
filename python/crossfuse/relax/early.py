"""Kernels of a model that start early: which calls do, and what they load before they wait.

A call starts early if it needs what another kernel of ours makes in the same graph. The first of
such a chain starts when all before it is over, whoever launched that, so what was written before it
is there for the whole chain. What nothing in the graph writes, weights above all, may then be
loaded by kernels of the chain at any time; what the graph makes is waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tvm import relax
from tvm.ir import Call, GlobalVar, Var

from crossfuse.lower.image import starting_early
from crossfuse.markers import starts_early
from crossfuse.relax.calls import is_kernel
from crossfuse.relax.graph import CALL_TIR, variables_of

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel, as far as its start is concerned."""

    #: Name of the kernel.
    function: Any
    #: Whether it needs what another kernel makes in the same graph.
    follows: bool = False
    #: Which of its arguments nothing in the graph writes, by their places.
    constant: frozenset[int] = frozenset()

    def is_first(self, functions: Mapping[Any, Any]) -> bool:
        """Whether it begins a chain, though its kernel starts early in other calls."""
        return not self.follows and starts_early(functions[self.function])


def with_early_starts(
    functions: Mapping[Name, Any], calls: Collection[KernelCall]
) -> dict[Name, Any]:
    """Scheduled functions, of which those start early that some call has follow another kernel.

    All calls of a function share a kernel, so what it loads before it waits is constant in each of
    them that follows another one.
    """
    made = dict(functions)
    for name, func in functions.items():
        behind = [each.constant for each in calls if each.function == name and each.follows]
        if behind:
            places = frozenset.intersection(*behind)
            names = [str(each.name) for place, each in enumerate(func.params) if place in places]
            made[name] = starting_early(func, names)
    return made


# Calls in functions of Relax, before kernels are built.


def calls_of(mod: Any) -> dict[Var, KernelCall]:
    """Calls of kernels in the Relax functions of a module, by the variables that they make."""
    found: dict[Var, KernelCall] = {}
    kernels = {name for name, func in mod.functions_items() if is_kernel(func)}
    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            found |= _calls(function, kernels)
    return found


def _calls(function: Any, kernels: Collection[GlobalVar]) -> dict[Var, KernelCall]:
    """Calls in the blocks of a function; those in branches begin chains of their own."""
    bindings = [each for block in function.body.blocks for each in block.bindings]
    read_only = set(function.params) - set(_touched(bindings))
    found: dict[Var, KernelCall] = {}
    behind: set[Var] = set()
    for each in bindings:
        value = each.value
        callee = kernel_of(value, kernels)
        if callee is not None:
            given = value.args[1].fields
            constant = (n for n, x in enumerate(given) if not isinstance(x, Var) or x in read_only)
            follows = any(x in behind for x in given if isinstance(x, Var))
            found[each.var] = KernelCall(callee, follows, frozenset(constant))
        if callee is not None or any(x in behind for x in variables_of(value, {})):
            behind.add(each.var)
    return found


def kernel_of(value: Any, kernels: Collection[GlobalVar]) -> GlobalVar | None:
    """The kernel that a value calls, or None."""
    if not isinstance(value, Call) or getattr(value.op, "name", "") != CALL_TIR:
        return None
    return next((each for each in kernels if value.args[0].same_as(each)), None)


def _touched(bindings: Iterable[Any]) -> Iterable[Var]:
    """Variables that something takes which is no plain call of a TensorIR function."""
    for each in bindings:
        if not isinstance(each.value, Call) or getattr(each.value.op, "name", "") != CALL_TIR:
            yield from variables_of(each.value, {})
