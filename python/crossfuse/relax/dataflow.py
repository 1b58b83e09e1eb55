"""A Relax function of any operators as bindings and their users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, Var
from tvm_ffi import structural_walk

from crossfuse.errors import RefusedError
from crossfuse.relax.operators import CAST, RESHAPES, check_elementwise, is_tensor, operator


@dataclass(frozen=True)
class Dataflow:
    """Bindings of one Relax function, whatever they compute.

    In contrast to `crossfuse.relax.graph.Graph`, which is one chain and nothing else, there may be
    any operators and several results.
    """

    function: Any
    #: What each variable is bound to, in the order of binding.
    values: Mapping[Var, Any]

    @cached_property
    def users(self) -> dict[Var, list[Any]]:
        """Variables whose values read a variable; None stands for the function's result."""
        found: dict[Var, list[Any]] = {}
        for variable, value in self.values.items():
            for used in _variables(value):
                found.setdefault(used, []).append(variable)
        for used in _variables(self.function.body.body):
            found.setdefault(used, []).append(None)
        return found

    def operator(self, value: Any) -> str:
        """Name of the operator that makes a value; empty if no operator does."""
        call = self.values.get(value) if isinstance(value, Var) else None
        if not isinstance(call, Call):
            return ""
        try:
            return operator(call)
        except RefusedError:
            return ""

    def arguments(self, value: Var) -> list[Any]:
        """Tensors that a bound variable is made of."""
        return [each for each in self.values[value].args if is_tensor(each)]

    def is_elementwise(self, value: Any) -> bool:
        """Whether elements depend only on those at their own place, in row-major order."""
        name = self.operator(value)
        if not name or not is_tensor(value):
            return False
        return name == CAST or name in RESHAPES or self._place_by_place[value]

    @cached_property
    def _place_by_place(self) -> Mapping[Var, bool]:
        return _Elementwise(self.values)


class _Elementwise(dict[Var, bool]):
    """Verdicts of `check_elementwise` by variable, computed when first asked for."""

    def __init__(self, values: Mapping[Var, Any]) -> None:
        super().__init__()
        self._values = values

    def __missing__(self, variable: Var) -> bool:
        try:
            check_elementwise(self._values[variable])
        except RefusedError:
            self[variable] = False
        else:
            self[variable] = True
        return self[variable]


def read_dataflow(function: Any) -> Dataflow:
    """Read the bindings of a function that `clean` has normalised."""
    values: dict[Var, Any] = {}
    for block in function.body.blocks:
        for binding in block.bindings:
            values[binding.var] = binding.value
    return Dataflow(function, values)


def clean(mod: tvm.IRModule) -> tvm.IRModule:
    """Normalise a module: no repeated, renamed or dead bindings."""
    return tvm.transform.Sequential(
        [
            relax.transform.Normalize(),
            relax.transform.CanonicalizeBindings(),
            relax.transform.EliminateCommonSubexpr(),
            relax.transform.DeadCodeElimination(),
        ]
    )(mod)


def subgraph(
    dataflow: Dataflow, inner: Sequence[Var], output: Var, named: bool = True
) -> tuple[Any, list[Var]]:
    """Some bindings as a module of their own, and the variables its parameters stand for.

    `inner` is in the order of binding and contains `output`. Parameters have the names of what they
    stand for, or are numbered if not `named`, so that equal parts of a model are equal texts.
    """
    given: list[Var] = []
    for variable in inner:
        for used in _variables(dataflow.values[variable]):
            if used not in inner and used not in given:
                given.append(used)
    names = [str(each.name) if named else f"given_{i}" for i, each in enumerate(given)]
    image: dict[Any, Any] = {
        each: relax.Var(name, each.ty) for name, each in zip(names, given, strict=True)
    }
    builder = relax.BlockBuilder()
    with builder.function("main", [image[each] for each in given]):
        with builder.dataflow():
            for variable in inner:
                call = dataflow.values[variable]
                args = [image.get(each, each) for each in call.args]
                again = Call(call.op, args, call.attrs, call.ty_args)
                emit = builder.emit_output if variable.same_as(output) else builder.emit
                image[variable] = emit(again)
        builder.emit_func_output(image[output])
    return builder.get(), given


def _variables(value: Any) -> list[Var]:
    """Relax variables that an expression reads, each once."""
    if isinstance(value, Var):
        return [value]
    found: list[Var] = []
    structural_walk(value, (Var, found.append))
    return list(dict.fromkeys(each for each in found if not isinstance(each.ty, tvm.ir.PrimType)))
