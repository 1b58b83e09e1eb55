"""Checker (a): the scheduled function itself, run sequentially on the CPU; and float64 references.

A scheduled function stays semantically sequential: with its thread bindings serialised and its
scopes dropped it is an ordinary program. That checks the schedule, not the lowering. Parallel
loops run once forwards and once backwards: a schedule whose parallel iterations overwrite each
other gives two answers.
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
from crossfuse.calls import AnyProgram, checked
from crossfuse.emulate.float_operators import as_on_gpu, by_bits, converted, of_buffers
from crossfuse.emulate.serialise import serialise
from crossfuse.errors import ArtefactRefused, CheckFailed, Rule, WorkloadRefused, refuse
from crossfuse.lower.extract import buffer_specs, only_function
from crossfuse.lower.hidden import keep_nans
from crossfuse.schema import Count, Extent
from crossfuse.workload.dtypes import is_float, numpy_type
from crossfuse.workload.tolerances import Tolerance, plain_tolerance

if TYPE_CHECKING:
    import numpy as np

    from crossfuse.lower.image import BufferSpec

#: Compaction, done already, takes too small a buffer where an index runs backwards.
_DISABLED = ("s_tir.CompactBufferAllocation",)
#: Level 0 compiles in a third of the time of level 1, and its code takes twice as long: where
#: parameters have fewer elements than this, compiling is most of the time. From level 2 on
#: vectorised loops of some bfloat16 products read past their operands: LLVM goes wrong on what
#: levels 0 and 1 get right.
_LARGE = 1 << 20


@dataclass(frozen=True)
class SequentialReport:
    """Results of the sequential run, and whether the order of parallel loops matters."""

    #: Written parameters by name, from the forward run.
    outputs: dict[str, np.ndarray]
    #: Whether the backward run gave the same bits.
    orders_agree: bool

    @property
    def ok(self) -> bool:
        """Whether parallel iterations are independent, as far as this input shows."""
        return self.orders_agree

    def raise_if_wrong(self) -> None:
        """Raise `CheckFailed` if the two orders disagree."""
        if not self.orders_agree:
            raise refuse(
                CheckFailed,
                "llvm",
                f"outputs {', '.join(self.outputs)}",
                found="other results when parallel loops run backwards",
                limit="iterations bound to CTAs and threads are independent",
                instead="look for a block whose loops give one element to several threads, such "
                "as a stage with fewer elements than threads",
            )


@checked
def run_sequential(
    func: AnyProgram,
    arguments: Mapping[str, np.ndarray] | Sequence[np.ndarray],
) -> SequentialReport:
    """Run a scheduled function on the CPU, forwards and backwards.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc | tvm.s_tir.Schedule | tvm.ir.IRModule
        A scheduled function of constant shapes.
    arguments : Mapping | Sequence
        Input arrays by parameter name, or in parameter order; missing ones are outputs. Of a
        function that takes fewer rows they may have fewer: NaNs take the place of the others, and
        outputs have as many rows.

    Returns
    -------
    SequentialReport
        Outputs, and whether both orders agree.

    Raises
    ------
    ArtefactRefused
        If arrays with rows have different numbers of them, or more than the function.

    Examples
    --------
    >>> from crossfuse.schedule.rules.threads import schedule_split_k
    >>> from crossfuse.workload import check, parse, prim_func, random_inputs
    >>> spec = parse("gemm:M=16,K=64,N=16")
    >>> inputs = random_inputs(spec)
    >>> report = run_sequential(schedule_split_k(prim_func(spec), cluster=4).mod["main"], inputs)
    >>> check(spec, inputs, report.outputs["out"]).worst <= 1
    True
    """
    function = only_function(func)
    forwards, *later = (run_serial(each, function, arguments) for each in _orders(function))
    agree = all(
        found[name].tobytes() == forwards[name].tobytes() for found in later for name in found
    )
    return SequentialReport(forwards, agree)


# Functions never change, so that one is known by what it is: several inputs need one compilation.
@lru_cache(maxsize=4)
def _orders(function: Any) -> tuple[Any, ...]:
    """Sequential forms: forwards, and backwards where parallel loops make that another function."""
    forwards, backwards = serialise(function), serialise(function, backwards=True)
    same = ir.tvm_ffi.structural_equal(forwards, backwards)
    return (forwards,) if same else (forwards, backwards)


def run_serial(
    serial: Any, function: Any, arguments: Mapping[str, np.ndarray] | Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Run the sequential form of a function once; the outputs by name.

    `serial` is what `serialise` made of `function`; for `arguments` see `run_sequential`.
    """
    return _compiled(serial, function)(arguments)


@lru_cache(maxsize=8)
def _compiled(serial: Any, function: Any) -> SequentialFunction:
    return SequentialFunction(serial, function)


class SequentialFunction:
    """The sequential form of a function, compiled once for many calls.

    `serial` is what `serialise` made of `function`.
    """

    def __init__(self, serial: Any, function: Any) -> None:
        self._specs = {each.name: each for each in buffer_specs(function)}
        self._names = [str(each.name) for each in function.params]
        large = sum(prod(each.shape) for each in self._specs.values()) >= _LARGE
        target = ir.tvm.target.Target({"kind": "llvm", "opt-level": int(large)})
        module = ir.tvm.ir.IRModule({"main": serial})
        with ir.tvm.transform.PassContext(disabled_pass=_DISABLED):
            self._executable = ir.tvm.compile(module, target, tir_pipeline="default")

    def __call__(
        self, arguments: Mapping[str, np.ndarray] | Sequence[np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Run the function; the outputs by name. For `arguments` see `run_sequential`."""
        import numpy as np

        given = (
            arguments
            if isinstance(arguments, Mapping)
            else dict(zip(self._names, arguments, strict=False))
        )
        count = _rows_given(self._specs, given)
        arrays = {}
        for name, spec in self._specs.items():
            value = given.get(name)
            array = np.zeros(spec.shape, numpy_type(spec.dtype)) if value is None else value
            if spec.rows and value is not None:
                array = _with_all_rows(spec, value)
            arrays[name] = ir.tvm.runtime.tensor(array)
        self._executable["main"](*arrays.values())
        outputs = {}
        for spec, (name, array) in zip(self._specs.values(), arrays.items(), strict=True):
            if name not in given:
                found = array.numpy()
                # A number has no rows to cut.
                outputs[name] = found[:count] if spec.rows else found
        return outputs


def _rows_given(specs: Mapping[str, BufferSpec], given: Mapping[str, np.ndarray]) -> int | None:
    """Number of rows of a call; None if every call has all rows."""
    counts = {name: len(given[name]) for name, each in specs.items() if each.rows and name in given}
    if not counts:
        return None
    most = next(each.shape[0] for each in specs.values() if each.rows)
    count = next(iter(counts.values()))
    if set(counts.values()) != {count} or not 1 <= count <= most:
        raise refuse(
            ArtefactRefused,
            "llvm",
            f"arrays {', '.join(counts)}",
            found=f"{', '.join(map(str, counts.values()))} rows",
            limit=f"as many in all of them, 1 to {most}",
            instead="pass arrays of equally many rows",
        )
    return count


def _with_all_rows(spec: BufferSpec, array: np.ndarray) -> np.ndarray:
    """An array padded to all rows with NaNs, which show in any row that depends on another one."""
    import numpy as np

    whole = np.full(spec.shape, np.nan).astype(array.dtype)
    whole[: len(array)] = array
    return whole


# References without a spec: any function's results in float64, and in its own types.
#
# The function runs as it stands, unscheduled, on the CPU through LLVM. For float64 all of its
# floating-point buffers and expressions become float64 first; intermediate roundings do not happen
# then. Integers keep their types.


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
    sch = ir.Schedule(as_on_gpu(by_bits(keep_nans(function))))
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
    inside = [e for block in ir.nodes(function.body, ir.SBlock) for e in block.alloc_buffers]
    images = {
        each: ir.tirx.decl_buffer(list(each.ty.shape), _WIDE, each.name)
        for each in (*function.params, *inside)
        if is_float(str(each.ty.dtype))
    }

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return ir.tirx.BufferLoad(images.get(node.source, node.source), list(node.indices))

    def store(node: Any, mutator: Any) -> Any:
        indices = [mutator.mutate(each) for each in node.indices]
        buffer = images.get(node.buffer, node.buffer)
        return ir.BufferStore(buffer, mutator.mutate(node.value), indices)

    def number(node: Any, _: Any) -> Any:
        return ir.tirx.FloatImm(_WIDE, float(node.value))

    def cast(node: Any, mutator: Any) -> Any:
        return converted(mutator.mutate(node.value), _type_of(str(node.ty)))

    def operator(node: Any, mutator: Any) -> Any:
        return type(node)(mutator.mutate(node.a), mutator.mutate(node.b))

    def select(node: Any, mutator: Any) -> Any:
        parts = (node.condition, node.true_value, node.false_value)
        return ir.tirx.Select(*map(mutator.mutate, parts))

    def call(node: Any, mutator: Any) -> Any:
        arguments = [mutator.mutate(each) for each in node.args]
        return ir.Call(node.op, arguments, ret_ty=_type_of(str(node.ty)))

    body = ir.mutate(
        function.body,
        (ir.TensorLoad, load),
        (ir.BufferStore, store),
        (ir.SBlock, of_buffers(images)),
        (ir.tirx.FloatImm, number),
        (ir.tirx.Cast, cast),
        (ir.tirx.Select, select),
        (ir.Call, call),
        *((getattr(ir.tirx, each), operator) for each in _OPERATORS),
    )
    params = [images.get(each, each) for each in function.params]
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
