"""What is made of scores, made once: every step then reads it in their place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.epilogue.elements import fast, fast_tanh
from crossfuse.lower.hopper.stream.program import Kind, Step, StreamProgram, inequality, ranges
from crossfuse.lower.hopper.stream.recover.statements import branches_of


def share_elements(program: StreamProgram) -> StreamProgram:
    """Write the program as a kernel computes it, with fast functions of float32.

    Steps that make the same elements of scores, such as a maximum and the exponentials behind it,
    make them once, in the registers of the scores. What masks choose comes last, so that it is
    left out for tiles inside; a positive factor waits for whoever reads the elements: a maximum
    is multiplied once for each row, an exponential takes it for nothing.
    """
    shared = _shared_element(program)
    if shared is not None:
        program = _with_element(program, shared)
    return program.mapped(lambda value: fast(fast_tanh(value)))


def _shared_element(program: StreamProgram) -> Any:
    """The only expression of scores alone that steps read; None if they read several."""
    found = [each for step in program.all_steps for each in _elements(step.value, program)]
    if not found:
        return None
    first, *others = found
    equal = all(ir.tvm_ffi.structural_equal(first, each) for each in others)
    return first if equal else None


def _elements(value: Any, program: StreamProgram) -> Iterator[Any]:
    """The largest expressions in a value that read scores and nothing else on the chip."""
    if not ir.mentions(value, program.scores):
        return
    loads = ir.buffer_loads(value)
    local = [each.source for each in loads if not ir.is_global(each.source)]
    if all(each.same_as(program.scores) for each in local):
        yield value
        return
    for each in _operands(value):
        yield from _elements(each, program)


def _operands(value: Any) -> list[Any]:
    """Expressions that an expression is made of."""
    if isinstance(value, ir.Call):
        return list(value.args)
    names = ("a", "b", "value", "condition", "true_value", "false_value")
    return [getattr(value, name) for name in names if hasattr(value, name)]


def _with_element(program: StreamProgram, element: Any) -> StreamProgram:
    """The same program with the element in the place of each score."""
    masks, inner, factor = _split(element, program)
    loads = ir.buffer_loads(element)
    load = next(each for each in loads if each.source.same_as(program.scores))
    made = load if factor is None else load * factor

    def changed(step: Step) -> Step:
        return replace(step, value=_replaced(step.value, element, made))

    steps = []
    if not isinstance(inner, ir.TensorLoad):
        steps.append(Step("element", Kind.TILE, program.scores, inner))
    steps += [
        Step("mask", Kind.MASK, program.scores, condition, other) for condition, other in masks
    ]
    reading = [each for each in program.steps if ir.mentions(each.value, program.scores)]
    others = list(program.steps)
    place = others.index(reading[0]) if reading else len(others)
    others[place:place] = steps
    changed_steps = tuple(each if each in steps else changed(each) for each in others)
    return replace(program, steps=changed_steps, weights=changed(program.weights))


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """An expression with another one in the place of a part of it."""
    if ir.tvm_ffi.structural_equal(value, old):
        return new

    def visit(node: Any, mutator: Any) -> Any:
        if ir.tvm_ffi.structural_equal(node, old):
            return new
        return mutator.default_mutate(node)

    return ir.mutate(value, (type(old), visit))


def _split(element: Any, program: StreamProgram) -> tuple[list[tuple[Any, Any]], Any, Any]:
    """Conditions of an element with what stands where they do not hold; what it else is; a factor.

    Later conditions come first in the expression: the outermost one has the last word. Those that
    hold in every tile are left out.
    """
    masks: list[tuple[Any, Any]] = []
    while True:
        condition, chosen, other = branches_of(element)
        if condition is None or not isinstance(other, ir.tirx.FloatImm):
            break
        masks = [(each, other) for each in ir.terms(condition) if not _holds(each, program)] + masks
        element = chosen
    factor = None
    # Infinities stay what they are under a positive factor.
    if all(math.isinf(float(other.value)) for _, other in masks):
        element, factor = positive_factor(element)
    return masks, element, factor


def positive_factor(value: Any) -> tuple[Any, Any]:
    """An expression without the positive number that it is multiplied by, and that number."""
    if isinstance(value, ir.tirx.Mul):
        for one, other in ((value.a, value.b), (value.b, value.a)):
            if isinstance(other, ir.tirx.FloatImm) and 0 < float(other.value) < math.inf:
                return one, other
    return value, None


def _holds(condition: Any, program: StreamProgram) -> bool:
    """Whether a condition holds for all elements of all tiles."""
    found = inequality(condition, program)
    return found is not None and bool(ranges(program).can_prove(found.value >= 0))
