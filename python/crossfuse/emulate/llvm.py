"""Checker (a): the scheduled function itself, run sequentially on the CPU through LLVM.

A scheduled function stays semantically sequential: with its thread bindings serialised and its
scopes dropped it is an ordinary program. That checks the schedule, not the lowering. Parallel
loops run once forwards and once backwards: a schedule whose parallel iterations overwrite each
other gives two answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.calls import AnyProgram, checked
from crossfuse.emulate.serialise import serialise
from crossfuse.errors import ArtefactRefused, CheckFailed, refuse
from crossfuse.lower.extract import buffer_specs, only_function
from crossfuse.workload.dtypes import numpy_type

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
    >>> from crossfuse.schedule.rules.split_k import schedule_split_k
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
        pairs = zip(self._names, function.params, serial.params, strict=True)
        #: Parameters that LLVM has no arithmetic for, in the type that stands in for theirs.
        self._wide = {
            name: "float32"
            for name, parameter, image in pairs
            if str(image.ty.dtype) != str(parameter.ty.dtype)
        }
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
            wide = self._wide.get(name)
            arrays[name] = ir.tvm.runtime.tensor(array.astype(wide) if wide else array)
        self._executable["main"](*arrays.values())
        outputs = {}
        for spec, (name, array) in zip(self._specs.values(), arrays.items(), strict=True):
            if name not in given:
                found = array.numpy().astype(numpy_type(spec.dtype))
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
