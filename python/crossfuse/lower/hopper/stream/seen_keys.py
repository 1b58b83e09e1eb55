"""Which keys rows see, where memory says it of keys alone: tiles without any are passed by.

Whether that changes nothing is read off the steps. With a flag of keys put to false they are
folded, and have to leave the state of rows and the sums as they are: a maximum takes -inf, a sum
zeros, weights are zeros, and factors are ``exp(m - m)``. Numbers of the state are taken to be
finite; a row that has seen nothing has its first state, which corrections leave alone. What is
masked may be anything, NaN too, as in the cascade itself.

Scores may be masked by a large negative number instead of -inf, as cuDNN's attention (-65536) and
models (the least number of their type) do. What is masked so counts for nothing beside a key that
is seen, but a row that sees none weighs what is masked: no tile may be passed by then. So flags
have to say for all rows which keys these see, and nothing else may mask by the key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.rewrite.tiled.skipping import HIDES
from crossfuse.hardware import WARPGROUP_ROWS
from crossfuse.lower.hopper.epilogue.elements import fast, fast_tanh
from crossfuse.lower.hopper.stream.program import (
    Kind,
    RowSteps,
    Seen,
    Step,
    StreamProgram,
    inequality,
    ranges,
)
from crossfuse.lower.hopper.stream.recover.statements import branches_of

# Flags of keys, such as a mask of padding, which are the same for all rows.
#
# A thread that loaded those of its columns by itself would load a byte for each of them: that
# took a third of the time of attention of one token. So the threads of a warp load a flag each,
# of 32 neighbouring keys, and vote: each keeps the word, and tests bits of it.

#: Keys of a word: threads of a warp.
VOTERS = 32
_VOTE = """\
__device__ __forceinline__ unsigned crossfuse_vote(bool flag) {
  return __ballot_sync(0xffffffffu, flag);
}
"""
_COMPARISONS = (ir.tirx.EQ, ir.tirx.NE, ir.tirx.LT, ir.tirx.LE, ir.tirx.GT, ir.tirx.GE)
#: Expressions that may be true or false.
_FLAGS = (ir.TensorLoad, ir.tirx.And, ir.tirx.Or, ir.tirx.Not, *_COMPARISONS)


def vote(flag: Any) -> Any:
    """Flags of 32 keys, one of each thread."""
    return ir.cuda_func_call("crossfuse_vote", flag, source_code=_VOTE, return_type="uint32")


def with_flags(value: Any, program: RowSteps, name: Callable[[Any], Any]) -> Any:
    """An expression of elements with something in the place of each of its largest flags."""

    def visit(part: Any, mutator: Any) -> Any:
        return name(part) if _is_flag(part, program) else mutator.default_mutate(part)

    return ir.mutate(value, *((kind, visit) for kind in _FLAGS))


def _is_flag(part: Any, program: RowSteps) -> bool:
    """Whether an expression is true or false of a key, whatever the row, by what is loaded."""
    if str(part.ty) != "bool" or ir.mentions(part, program.row):
        return False
    loads = ir.nodes(part, ir.TensorLoad)
    stored = all(ir.is_global(each.source) for each in loads)
    return stored and any(ir.mentions(each, program.key) for each in loads)


def load_within(load: Any, program: RowSteps) -> Any:
    """A load of a parameter; beyond it, where nothing counts, of its first or last element."""
    bounded = ranges(program)
    indices = []
    for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
        index = index if bounded.can_prove(index >= 0) else ir.script.max(index, 0)
        inside = bounded.can_prove(index < extent)
        indices.append(index if inside else ir.script.min(index, extent - 1))
    return load.source[tuple(indices)]


def seen_keys(program: StreamProgram) -> Seen | None:
    """Which keys rows see, whatever the row; None if no tile is to be passed by.

    Asked of tiles of 64 rows, the fewest: of one token, or a few, where memory is what counts.
    Where there are more, products are, and none of them waits for flags.
    """
    first, end = program.stream.bounds
    if end - first < 2 or program.tile[0] > WARPGROUP_ROWS:
        return None
    beside = program.beside
    found = [
        (seen, limit)
        for flag in _flags(program)
        for seen, value in ((flag, False), (ir.tirx.Not(flag), True))
        if beside is None or not ir.mentions(flag, beside.var)
        if (limit := _silenced(program, flag, value)) is not None
    ]
    if not found:
        return None
    flags, limits = zip(*found, strict=True)
    return Seen(ir.conjunction(flags), HIDES in limits)


def _silenced(program: StreamProgram, flag: Any, value: bool) -> float | None:
    """The number up to which masks have to count for nothing, so that a flag silences keys."""
    limits = (-math.inf, *([HIDES] if _flags_say_all(program) else []))
    return next((each for each in limits if _leaves_state(program, flag, value, each)), None)


def _flags_say_all(program: StreamProgram) -> bool:
    """Whether rows see the same keys: nothing else that is loaded or compared is of the key."""
    stream, split = program.stream, program.split
    own = () if split is None else (split.place.var,)
    known = (program.key, stream.var, *own)

    def is_of(value: Any, variables: Sequence[Any]) -> bool:
        return all(ir.among(each, variables) for each in ir.nodes(value, ir.tirx.Var))

    if not is_of(stream.first, own) or not is_of(stream.count, own):
        return False
    for step in program.all_steps:
        value = with_flags(step.value, program, lambda _: ir.tirx.IntImm("bool", 1))
        loads = [each for each in ir.nodes(value, ir.TensorLoad) if ir.is_global(each.source)]
        compared = [each for kind in _COMPARISONS for each in ir.nodes(value, kind)]
        if any(ir.mentions(each, program.key) for each in loads):
            return False
        if not all(is_of(each, known) for each in compared if ir.mentions(each, program.key)):
            return False
    return True


def _flags(program: StreamProgram) -> list[Any]:
    """The largest flags of keys in steps, each once."""
    found: list[Any] = []

    def note(flag: Any) -> Any:
        if not any(ir.alike(flag, each) for each in found):
            found.append(flag)
        return flag

    for step in program.all_steps:
        with_flags(step.value, program, note)
    return found


def _leaves_state(program: StreamProgram, flag: Any, value: bool, limit: float) -> bool:
    """Whether a tile where a flag has the same value for all keys leaves the state as it is."""
    dead = ir.tirx.IntImm("bool", value)

    def put(each: Any) -> Any:
        return with_flags(each, program, lambda part: dead if ir.alike(part, flag) else part)

    known = _Known(limit)
    for step in (*program.all_steps, *program.carries):
        known.run(step, put(step.value))
    if known.number_of(program.weights.target) != 0:
        return False
    state = [*(each.target for each in program.before), program.sums]
    read = _read_behind(program)
    return all(map(known.is_kept, state)) and all(ir.among(each, state) for each in read)


def _read_behind(program: StreamProgram) -> list[Any]:
    """Buffers on the chip that are read when the stream is over, but for those made there."""
    steps = program.after if program.split is None else program.split.slabs
    values = [each.value for each in steps]
    values += [program.result] if program.split is None else []
    made = [each.target for each in steps]
    loads = [each.source for value in values for each in ir.nodes(value, ir.TensorLoad)]
    return [each for each in loads if not ir.is_global(each) and not ir.among(each, made)]


class _Known:
    """What steps have made of buffers; those without an entry are as the tile before left them.

    Numbers up to a limit are so small that whatever is added to them leaves them so.
    """

    def __init__(self, limit: float) -> None:
        self._values: dict[Any, Any] = {}
        self._rules = _Rules(limit)

    def run(self, step: Step, value: Any) -> None:
        """Take note of a step, with its value or what stands for that."""
        value, target = self._folded(value), step.target
        if step.kind in (Kind.ROW, Kind.TILE, Kind.CARRY):
            self._values[target] = value
        elif step.kind is Kind.MASK:
            holds = ir.constant(value)
            if holds is None:
                self._values[target] = _unknown(step)
            elif not holds:
                self._values[target] = step.start
        else:
            number = _number(value)
            least = step.kind is Kind.TOP and self._rules.is_least(number)
            if not least and not (step.kind is Kind.SUM and number == 0):
                self._values[target] = _unknown(step)
            elif step.start is not None:
                self._values[target] = self._folded(step.start)

    def is_kept(self, buffer: Any) -> bool:
        """Whether a buffer is as the tile before left it."""
        value = self._values.get(buffer)
        same = isinstance(value, ir.TensorLoad) and value.source.same_as(buffer)
        return value is None or same

    def number_of(self, buffer: Any) -> float | None:
        """The number that all elements of a buffer are; None if they may differ."""
        value = self._values.get(buffer)
        return None if value is None else _number(value)

    def _folded(self, value: Any) -> Any:
        def visit(node: Any, mutator: Any) -> Any:
            if isinstance(node, ir.TensorLoad):
                return self._values.get(node.source, node)
            return self._rules.fold(mutator.default_mutate(node))

        kinds = (ir.TensorLoad, ir.Call, ir.tirx.Select, *self._rules.by_kind)
        return ir.mutate(value, *((kind, visit) for kind in kinds))


def _unknown(step: Step) -> Any:
    return ir.tirx.Var(f"unknown_{step.name}", "float32")


def _number(value: Any) -> float | None:
    return float(value.value) if isinstance(value, ir.tirx.FloatImm) else None


class _Rules:
    """Folding of float32, where what is no constant is a finite number.

    Numbers up to `limit`, -inf among them, are the least: beside others these count for nothing.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.by_kind: dict[type, Callable[[Any], Any]] = {
            ir.tirx.Cast: _cast,
            ir.tirx.Add: self._add,
            ir.tirx.Sub: self._subtract,
            ir.tirx.Mul: self._multiply,
            ir.tirx.Div: _divide,
            ir.tirx.Max: self._maximum,
            ir.tirx.EQ: _equal,
            ir.tirx.LT: _less,
            ir.tirx.GT: _less,
            ir.tirx.And: _both,
            ir.tirx.Or: _either,
            ir.tirx.Not: _not,
        }

    def fold(self, node: Any) -> Any:
        """What an expression is, whose parts are folded."""
        condition, chosen, other = branches_of(node)
        if condition is not None:
            holds = ir.constant(condition)
            if holds is not None:
                return chosen if holds else other
            if all(self.is_least(_number(each)) for each in (chosen, other)):
                return chosen if chosen.value > other.value else other
            return other if _is_either(condition, chosen, other) else node
        if isinstance(node, ir.Call):
            return self._call(node)
        found = self.by_kind[type(node)](node)
        return node if found is None else found

    def is_least(self, number: float | None) -> bool:
        """Whether a number counts for nothing beside others."""
        return number is not None and number <= self._limit

    def _absorbs(self, number: float | None) -> bool:
        """Whether a number stays what it is when a finite one is added."""
        return number is not None and (math.isinf(number) or self.is_least(number))

    def _call(self, node: Any) -> Any:
        function = _FUNCTIONS.get(str(getattr(node.op, "name", "")).rpartition(".")[2])
        number = _number(node.args[0]) if function is not None else None
        if function is None or number is None:
            return node
        return ir.tirx.FloatImm(str(node.ty), 0.0 if self.is_least(number) else function(number))

    def _add(self, node: Any) -> Any:
        for one, other in ((node.a, node.b), (node.b, node.a)):
            number = _number(one)
            if number == 0:
                return other
            if self._absorbs(number) and _is_finite(other):
                return one
        return None

    def _subtract(self, node: Any) -> Any:
        if _is_finite(node.a) and ir.alike(node.a, node.b):
            return ir.tirx.FloatImm(str(node.ty), 0.0)
        taken = _number(node.b)
        if taken == 0:
            return node.a
        if taken is not None and self._absorbs(-taken) and _is_finite(node.a):
            return ir.tirx.FloatImm(str(node.ty), -taken)
        return node.a if self._absorbs(_number(node.a)) and _is_finite(node.b) else None

    def _multiply(self, node: Any) -> Any:
        for one, other in ((node.a, node.b), (node.b, node.a)):
            number, factor = _number(one), _number(other)
            if number == 1:
                return other
            if number == 0 and _is_finite(other):
                return one
            if number is not None and self._absorbs(number) and factor is not None and factor > 0:
                return ir.tirx.FloatImm(str(node.ty), _within(number * factor))
        return None

    def _maximum(self, node: Any) -> Any:
        for one, other in ((node.a, node.b), (node.b, node.a)):
            if self.is_least(_number(one)):
                return other
        return None


def _within(number: float) -> float:
    """A number as float32 holds it: a product of two may be infinite."""
    return math.copysign(math.inf, number) if abs(number) > _LARGEST else number


def _is_either(condition: Any, chosen: Any, other: Any) -> bool:
    """Whether a choice is its second value either way: both are alike, or equal where it counts."""
    if ir.alike(chosen, other):
        return True
    if not isinstance(condition, ir.tirx.EQ):
        return False
    sides = (condition.a, condition.b)
    return all(any(ir.alike(each, side) for side in sides) for each in (chosen, other))


def _cast(node: Any) -> Any:
    number = _number(node.value)
    fits = number is not None and "float" in str(node.ty)
    return ir.tirx.FloatImm(str(node.ty), number) if fits else None


def _equal(node: Any) -> Any:
    for one, other in ((node.a, node.b), (node.b, node.a)):
        number = _number(one)
        if number is not None and math.isinf(number) and _is_finite(other):
            return _truth(False)
    return None


def _less(node: Any) -> Any:
    one, other = _number(node.a), _number(node.b)
    if one is None or other is None:
        return None
    return _truth(one < other if isinstance(node, ir.tirx.LT) else one > other)


def _divide(node: Any) -> Any:
    one, other = _number(node.a), _number(node.b)
    return ir.tirx.FloatImm(str(node.ty), one / other) if one is not None and other else None


def _both(node: Any) -> Any:
    for one, other in ((node.a, node.b), (node.b, node.a)):
        holds = ir.constant(one)
        if holds is not None:
            return other if holds else one
    return None


def _either(node: Any) -> Any:
    for one, other in ((node.a, node.b), (node.b, node.a)):
        holds = ir.constant(one)
        if holds is not None:
            return one if holds else other
    return None


def _not(node: Any) -> Any:
    holds = ir.constant(node.a)
    return None if holds is None else _truth(not holds)


def _truth(value: bool) -> Any:
    return ir.tirx.IntImm("bool", value)


def _is_finite(value: Any) -> bool:
    number = _number(value)
    return str(value.ty).startswith(("float", "bfloat")) and (
        number is None or math.isfinite(number)
    )


#: The largest number of float32.
_LARGEST = 3.4028234663852886e38

_FUNCTIONS: dict[str, Callable[[float], float]] = {"exp": math.exp, "exp2": math.exp2}


# What is made of scores, made once: every step then reads it in their place.


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
