"""References without a spec: any function's results in float64, and in its own types.

The function runs as it stands, unscheduled, on the CPU through LLVM. For float64 all of its
floating-point buffers and expressions become float64 first; intermediate roundings do not happen
then. Integers keep their types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import is_reduction
from crossfuse.emulate.float_operators import as_on_gpu, converted, rebuilt, retyped, widen
from crossfuse.emulate.llvm import run_serial
from crossfuse.errors import Rule, WorkloadRefused
from crossfuse.lower.extract import buffer_specs, only_function
from crossfuse.lower.keep_nans import keep_nans
from crossfuse.schema import Count, Extent
from crossfuse.workload.dtypes import is_float, numpy_type
from crossfuse.workload.tolerances import Tolerance, plain_tolerance

if TYPE_CHECKING:
    import numpy as np

_reference_refused = Rule(WorkloadRefused, "reference")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function, with what is needed to draw inputs for it."""

    name: str
    shape: tuple[Extent, ...]
    dtype: str
    #: Whether the function writes it.
    output: bool
    #: Terms of the longest sum that reads it.
    depth: Count


def parameters(func: Any) -> tuple[Parameter, ...]:
    """Describe the parameters of a function, or of the only function of a module.

    Symbolic shapes, and parameters that are no buffers, raise `LoweringRefused`.
    """
    function = only_function(func)
    depths: dict[str, int] = {}
    for block in ir.nodes(function.body, ir.SBlock):
        summed = [each for each in block.iter_vars if is_reduction(each)]
        depth = prod(ir.constant(each.dom.extent) or 1 for each in summed)
        for each in block.reads:
            name = str(each.source.name)
            depths[name] = max(depths.get(name, 1), depth)
    return tuple(
        Parameter(each.name, each.shape, each.dtype, each.output, depths.get(each.name, 1))
        for each in buffer_specs(function)
    )


def draw(given: Sequence[Parameter], seed: int = 0) -> dict[str, np.ndarray]:
    """Draw random inputs by name; equal seeds give equal inputs.

    Floating-point numbers are normal, in all inputs but the first scaled so that sums of products
    are of order one. Integers of 8 bits are small, of either sign if signed; wider ones, which may
    be indices into a tensor, are 0 or 1.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    inputs = [each for each in given if not each.output]
    found = {}
    for number, each in enumerate(inputs):
        kind = numpy_type(each.dtype)
        if is_float(each.dtype):
            size = 1 / sqrt(each.depth) if number else 1.0
            found[each.name] = (size * rng.standard_normal(each.shape, np.float32)).astype(kind)
        else:
            low, high = {"int8": (-8, 8), "uint8": (0, 16)}.get(each.dtype, (0, 2))
            found[each.name] = rng.integers(low, high, each.shape).astype(kind)
    return found


def limits(func: Any, inputs: Mapping[str, np.ndarray]) -> Tolerance:
    """The tolerance of an unscheduled function's only output on these inputs.

    It is the result in float64, and at most twice the error of the function itself, which rounds
    between its blocks as it says. Functions that float64 cannot express, or with another number of
    outputs, raise `WorkloadRefused`.
    """
    import numpy as np

    function = only_function(func)
    known = parameters(function)
    output = the_output(known)
    wide, exactly, separately = _forms(function)
    doubles = {
        name: each.astype(np.float64) if is_float(str(each.dtype)) else each
        for name, each in inputs.items()
    }
    exact = run_serial(exactly, wide, doubles)[output.name]
    separate = run_serial(separately, function, inputs)[output.name]
    depth = max(each.depth for each in known)
    return plain_tolerance(exact.astype(np.float64), separate, depth)


@lru_cache(maxsize=4)
def _forms(function: Any) -> tuple[Any, Any, Any]:
    """A function in float64, as that runs, and as the function itself runs."""
    wide = in_float64(function)
    return wide, _quick(wide), _quick(function)


def the_output(given: Sequence[Parameter]) -> Parameter:
    """The only output, and last parameter, of a function; `WorkloadRefused` if there is no such."""
    outputs = [each.name for each in given if each.output]
    if len(outputs) != 1 or not given[-1].output:
        raise _refused(
            f"outputs {', '.join(outputs) or 'none'} of {len(given)} parameters",
            "one output, the last parameter",
            "measure functions of one output each",
        )
    return given[-1]


def _quick(function: Any) -> Any:
    """The same function, faster: on all cores, and along rows of what is multiplied.

    Every sum keeps the order in which the function takes it.
    """
    sch = ir.Schedule(as_on_gpu(widen(keep_nans(function))))
    for handle in sch.get_child_blocks(sch.get_sblock("root")):
        # What is no plain nest runs as it stands.
        with suppress(ir.ScheduleError):
            _hasten(sch, handle)
    return sch.mod["main"]


def _hasten(sch: Any, handle: Any) -> None:
    block, loops = sch.get(handle), sch.get_loops(handle)
    if len(loops) != len(block.iter_vars):
        return
    pairs = list(zip(loops, block.iter_vars, strict=True))
    outer = [loop for loop, each in pairs if not is_reduction(each)]
    summed = [loop for loop, each in pairs if is_reduction(each)]
    if summed and len(outer) > 1:
        last = next(each.var for loop, each in reversed(pairs) if not is_reduction(each))
        indices = [[each.min for each in read.region] for read in block.reads]
        if not any(each.same_as(last) for found in indices for each in found[:-1]):
            sch.reorder(*outer[:-1], *summed, outer[-1])
    if outer:
        sch.parallel(outer[0])


def _refused(found: str, limit: str, instead: str) -> Exception:
    return _reference_refused("function", found=found, limit=limit, instead=instead)


# Functions with float64 in place of every floating-point type, as references.
#
# Intermediate roundings of such a function do not happen then. Integers keep their types.

_WIDE = "float64"
_OPERATORS = ("Add", "Sub", "Mul", "Div", "Min", "Max", "EQ", "NE", "LT", "LE", "GT", "GE")
#: What has another meaning in another type, or in none of our types.
_FOREIGN = ("tirx.reinterpret", "tirx.call_extern", "tirx.call_pure_extern", "tirx.call_packed")


def in_float64(func: Any) -> Any:
    """An unscheduled function with float64 for every floating-point type; all else is unchanged.

    Functions that look at the bits of numbers, call foreign code, view a buffer as another one, or
    have floating-point scalar variables raise `WorkloadRefused`.
    """
    function = only_function(func)
    _check(function)
    images: dict[Any, Any] = {}

    def image(buffer: Any) -> Any:
        if not is_float(str(buffer.ty.dtype)):
            return buffer
        if buffer not in images:
            images[buffer] = ir.tirx.decl_buffer(list(buffer.ty.shape), _WIDE, buffer.name)
        return images[buffer]

    params = [image(each) for each in function.params]
    body = retyped(function.body, image, _converted, rebuilt(_type_of, _OPERATORS))
    return ir.PrimFunc(params, body, function.ret_type, function.attrs)


def _check(function: Any) -> None:
    """Refuse what has no counterpart in float64."""
    found: list[str] = []

    for call in ir.nodes(function.body, ir.Call):
        name = call.op.name if isinstance(call.op, ir.Op) else str(call.op)
        if name in _FOREIGN or not isinstance(call.op, ir.Op):
            found.append(f"a call of {name}")
    for block in ir.nodes(function.body, ir.SBlock):
        found += [f"a view, {each.buffer.name}" for each in block.match_buffers]
    for variable in ir.nodes(function.body, ir.Var):
        if not ir.is_buffer_var(variable) and is_float(str(variable.ty)):
            found.append(f"a variable of {variable.ty}, {variable.name}")
    if found:
        raise _reference_refused(
            "function",
            found=found[0],
            limit="loads and stores of buffers, arithmetic and TVM's own functions",
            instead="name the workload: a spec has a reference of its own",
        )


def _type_of(dtype: str) -> str:
    return _WIDE if is_float(dtype) else dtype


def _converted(value: Any, dtype: str) -> Any:
    return converted(value, _type_of(dtype))
