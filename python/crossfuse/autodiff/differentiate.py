"""The gradient of a function, as a function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse.autodiff.derivative import is_float
from crossfuse.autodiff.program import Program, is_selecting, read_program, refused
from crossfuse.autodiff.reverse import Reverse, dtype_of
from crossfuse.autodiff.simplify import simplified
from crossfuse.blocks.read import Block, write_function
from crossfuse.calls import AnyFunction, checked


@dataclass(frozen=True)
class Gradients:
    """A function that computes gradients, and what its parameters are.

    They come in this order: `inputs`, `kept`, `given`, and the values of `results`.

    Attributes
    ----------
    function : tvm.tirx.PrimFunc
        In s_tir form, a plain block for each buffer. It gathers: each element of a gradient is
        computed where it is stored.
    inputs : tuple[str, ...]
        Inputs of the differentiated function that are read again.
    kept : tuple[str, ...]
        Outputs and intermediates of the differentiated function that are read. Other intermediates
        are computed again.
    given : tuple[str, ...]
        Gradients of the outputs, one for each output of floating point: ``d_`` and its name.
    results : Mapping[str, str]
        For each input that a gradient was asked for the parameter that holds it.
    forward : tvm.tirx.PrimFunc
        The differentiated function, which stores also what is kept of its intermediates, as
        parameters behind its own in the order of `kept`.

    Examples
    --------
    >>> from crossfuse.workload import parse, prim_func
    >>> found = gradients(prim_func(parse("gemm:M=16,K=64,N=32")), wrt=["B"])
    >>> found.inputs, found.kept, found.given, dict(found.results)
    (('A',), (), ('d_out',), {'B': 'd_B'})
    """

    function: Any
    inputs: tuple[str, ...]
    kept: tuple[str, ...]
    given: tuple[str, ...]
    results: Mapping[str, str]
    forward: Any


@checked
def gradients(
    function: AnyFunction, wrt: Sequence[str] | None = None, keep: Sequence[str] = ()
) -> Gradients:
    """Differentiate a function of plain blocks.

    Parameters
    ----------
    function : tvm.tirx.PrimFunc
        In s_tir form, unscheduled: blocks of one store each whose indices are sums, multiples,
        quotients and remainders of loop variables, with choices between such.
    wrt : Sequence[str] | None
        Names of the inputs whose gradients are wanted; None for all of floating point.
    keep : Sequence[str]
        Names of intermediates that the gradient reads instead of computing them again.

    Returns
    -------
    Gradients
        A function in s_tir form whose blocks gather: index maps are inverted over the integers, so
        that nothing is scattered and no two iterations add to one element.

    Raises
    ------
    GradientRefused
        If a function is not made of plain blocks, a name is none of an input or intermediate, an
        operator has no derivative, or a map has no inverse over the integers: data among indices,
        products of variables.

    Examples
    --------
    >>> from tvm import te
    >>> x, w = te.placeholder((9,), "float32", "X"), te.placeholder((3,), "float32", "W")
    >>> k = te.reduce_axis((0, 3), "k")
    >>> y = te.compute((3,), lambda i: te.sum(x[2 * i + k] * w[k], axis=k), name="Y")
    >>> found = gradients(te.create_prim_func([x, w, y]), wrt=["X"])
    >>> [str(each.name) for each in found.function.params]
    ['W', 'd_Y', 'd_X']
    """
    program = read_program(function)
    wanted = _wanted(program, wrt)
    _check_kept(program, keep)
    reverse = Reverse(program, wanted).run()
    results = list(reverse.results.values())
    backward = simplified(program.blocks, reverse.blocks, results)
    blocks, read = _needed(program, backward, results, keep)
    kept = [each for each in _written(program) if each in read and each not in _buffers(blocks)]
    inputs = [each for each in program.inputs if each in read]
    given = list(reverse.given.values())
    made = write_function([*inputs, *kept, *given], blocks, results, program.dtype)
    stored = [each for each in kept if each not in program.outputs]
    return Gradients(
        made,
        _names(inputs),
        _names(kept),
        _names(given),
        {str(each.name): str(buffer.name) for each, buffer in reverse.results.items()},
        _forward(function, program, stored),
    )


def _names(buffers: Iterable[Any]) -> tuple[str, ...]:
    return tuple(str(each.name) for each in buffers)


def _buffers(blocks: Iterable[Block]) -> list[Any]:
    return [each.buffer for each in blocks]


def _written(program: Program) -> list[Any]:
    return _buffers(program.blocks)


def _wanted(program: Program, wrt: Sequence[str] | None) -> tuple[Any, ...]:
    floats = {str(each.name): each for each in program.inputs if is_float(dtype_of(each))}
    if not floats:
        found = f"inputs {', '.join(_names(program.inputs)) or 'none'}"
        raise refused("function", found, "an input of floating point", "convert inside of it")
    named = tuple(floats if wrt is None else dict.fromkeys(wrt))
    unknown = [repr(each) for each in named if each not in floats]
    if unknown or not named:
        found = ", ".join(unknown) or "no name"
        limit = f"inputs of floating point: {', '.join(floats)}"
        raise refused("wrt", found, limit, "name some of these, or leave wrt out")
    return tuple(floats[each] for each in named)


def _check_kept(program: Program, keep: Sequence[str]) -> None:
    known = _names(_written(program))
    for name in keep:
        if name not in known:
            limit = f"outputs and intermediates: {', '.join(known)}"
            raise refused("keep", repr(name), limit, "name some of these")


def _needed(
    program: Program, backward: Sequence[Block], results: Iterable[Any], keep: Sequence[str]
) -> tuple[list[Block], set[Any]]:
    """Blocks of the gradient with those that are computed again, and all buffers that they read."""
    stored = {each for each in program.outputs if not _is_of_values(program, each)}
    stored |= {each for each in _written(program) if str(each.name) in keep}
    needed, read = [], set(results)
    for block in reversed([*program.blocks, *backward]):
        if block.buffer in read and block.buffer not in stored:
            needed.append(block)
            read |= block.sources
    return needed[::-1], read


def _is_of_values(program: Program, output: Any) -> bool:
    """Whether an output is chosen among values that are computed again, and has to be too."""
    block = next(each for each in program.blocks if each.buffer.same_as(output))
    return is_selecting(block) and not block.sources <= {*program.inputs}


def _forward(function: Any, program: Program, stored: Sequence[Any]) -> Any:
    if not stored:
        return function
    results = [*program.outputs, *stored]
    return write_function(program.inputs, program.blocks, results, program.dtype)
