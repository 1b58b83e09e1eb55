"""What a job computes: inputs on the device, and what results are held against.

It is a spec, or a function without one, which has a name and a file.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from crossfuse.bench import variants
from crossfuse.bench.job import Variant, pack_apart, weight_bytes
from crossfuse.bench.variants import loaded, returning
from crossfuse.emulate.llvm import Parameter, draw, limits, parameters, the_output
from crossfuse.errors import CheckFailed, RefusedError, WorkloadRefused, refuse
from crossfuse.files import read_arrays, read_text, sha256, write_atomically
from crossfuse.measure.job import Given
from crossfuse.measure.timing import TimingConditions, copies_needed
from crossfuse.schema import Damaged, read
from crossfuse.workload.dtypes import FLOAT_TYPES
from crossfuse.workload.numerics import random_inputs
from crossfuse.workload.spec import WorkloadSpec
from crossfuse.workload.suites import parse
from crossfuse.workload.tolerances import Tolerance, judge, tolerance

if TYPE_CHECKING:
    from crossfuse.runtime import LoadedKernel

# Functions without a spec: their names, and the references of their kernels' results.
#
# A candidate is a scheduled function, which no longer says what it was made of. So the rules that
# schedule write the name of the function into the trace, as an annotation of the root block; the
# builder puts the function beside the library, and the runner has its reference computed once::
#
#    crossfuse.function = "function:1f0c6e3b9a7d5240"


#: Key of the annotation.
TAG = "crossfuse.function"
#: What names of functions begin with, in the place of a spec's text.
PREFIX = "function:"
_DIGITS = 16
#: Names become names of files.
_NAME = re.compile(rf"{PREFIX}[0-9a-f]{{{_DIGITS}}}")


def is_function(workload: str) -> bool:
    """Whether a workload is a function without a spec."""
    return bool(_NAME.fullmatch(workload))


def name_of(func: Any) -> str:
    """The name of an unscheduled function, a hash of what it computes, whatever it is called.

    Of a module it is the name of its only function.
    """
    from crossfuse.lower.extract import only_function

    function = only_function(func).with_attr("global_symbol", "main")
    return PREFIX + sha256(str(function.script()).encode())[:_DIGITS]


def tag_of(module: Any) -> str:
    """The name in a scheduled function's annotation; empty where there is none."""
    from crossfuse.lower.extract import only_function

    root = getattr(only_function(module).body, "block", None)
    return "" if root is None else str(root.annotations.get(TAG, ""))


def tag(sch: Any, name: str) -> Any:
    """Write the name of a schedule's only function into its trace; returns the schedule."""
    ((variable, _),) = sch.mod.functions.items()
    root = sch.get_sblock("root", func_name=str(variable.name_hint))
    sch.annotate(root, TAG, name)
    return sch


def path_of(folder: Path, name: str) -> Path:
    """The file of a function in a folder."""
    return folder / f"{name.removeprefix(PREFIX)}.function.json"


def keep(func: Any, folder: Path, name: str) -> Path:
    """Write an unscheduled function to its file: parameters, and the function as TVM writes it."""
    from crossfuse import _tvm as ir
    from crossfuse.lower.extract import only_function

    function = only_function(func)
    rows = [vars(each) for each in parameters(function)]
    value = {"parameters": rows, "function": ir.tvm.ir.save_json(function)}
    path = path_of(folder, name)
    write_atomically(path, json.dumps(value).encode())
    return path


def function_problem(workload: str, folder: Path) -> ArrayProblem:
    """Inputs of a function, by its name, and the limits of its result, which lie in the folder too.

    A function without a result in float64, or with a damaged file, is refused.
    """
    kept = _read(path_of(folder, workload))
    known = kept.parameters
    output = the_output(known)
    inputs = draw(known)
    path = folder / f"{workload.removeprefix(PREFIX)}.npz"
    if not path.is_file():
        keep_limits(limits(_function(kept.function, path), inputs), path)
    # All that is read but the first tensor counts as weights.
    weights = sum(each.nbytes for each in list(inputs.values())[1:])
    return ArrayProblem(workload, inputs, kept_limits(path, output.dtype), weights)


@dataclass(frozen=True)
class _Kept:
    """The file of a function."""

    parameters: tuple[Parameter, ...]
    function: str


def _read(path: Path) -> _Kept:
    try:
        return read(_Kept, read_text(path))
    except Damaged as error:
        raise _damaged(path, error.found, error.limit) from None


def _function(text: str, path: Path) -> Any:
    from crossfuse import _tvm as ir

    try:
        return ir.load_json(text, ir.PrimFunc)
    except Damaged as error:
        raise _damaged(path, error.found, error.limit) from None


def _damaged(path: Path, found: str, limit: str) -> RefusedError:
    return refuse(
        WorkloadRefused,
        "function",
        str(path),
        found=found,
        limit=f"{limit}, in a function as a search keeps it",
        instead="build its candidates again, which writes the file",
    )


#: Holds an output, or a tuple of outputs, against the rule: gives the largest error over the
#: allowed one and an empty message, or None and how the rule is broken.
Judge = Callable[[Any], tuple[float | None, str]]


@dataclass(frozen=True)
class Bound:
    """A computation on each of several sets of inputs, see `copies_needed`."""

    how: TimingConditions
    calls: Sequence[Callable[[], Any]]
    #: What is expected of each; sets that are equal have the same one. Empty where nothing is.
    judges: Sequence[Judge] = ()


class Problem(ABC):
    """What is computed, on inputs that are drawn for it."""

    @abstractmethod
    def variant(self, name: str, device: str) -> Variant:
        """A way to compute it by its name, see `crossfuse.bench.variants.make`."""

    def library(self, kernel: LoadedKernel, device: str) -> Variant:
        """A kernel of it that was compiled before, such as on another machine."""
        return returning(kernel)

    @abstractmethod
    def bind(self, variant: Variant, how: TimingConditions, device: str) -> Bound:
        """Place its inputs on the device, for one way to compute it."""


@dataclass
class ArrayProblem(Problem):
    """One set of random inputs on the host, and what a result is checked against."""

    #: What is computed: text of a spec, or the name of a function.
    what: str
    #: By name, in the order of the parameters; the weights come after the first.
    inputs: dict[str, np.ndarray]
    #: The float64 reference and the rule.
    limits: Tolerance
    #: Bytes that one computation reads of weights.
    weight_bytes: int
    #: Sets on the device, and what they were made by: most variants of a workload share them.
    _sets: list[list[Any]] = field(default_factory=list)
    _made_by: tuple[Any, ...] = ()

    @property
    def output(self) -> tuple[int, ...]:
        """Extents of the result."""
        return self.limits.reference.shape

    @property
    def dtype(self) -> str:
        """Type of the result."""
        return str(self.limits.unfused.dtype)

    def judge(self, output: Any) -> tuple[float | None, str]:
        """Hold an output against the rule, see `judged`."""
        return judged(self.limits, output, self.what)

    def variant(self, name: str, device: str) -> Variant:
        """A way to compute its spec."""
        return variants.make(name, parse(self.what), device)

    def library(self, kernel: LoadedKernel, device: str) -> Variant:
        """A kernel of it, which writes to one output."""
        return loaded(kernel, self.output, self.dtype, device)

    def bind(self, variant: Variant, how: TimingConditions, device: str) -> Bound:
        """Copy the inputs to the device, several sets of the weights."""
        from crossfuse.runtime.tensors import to_torch

        copies = copies_needed(self.weight_bytes, how.calls, how.l2)
        if self._made_by != (variant.pack, copies, device):
            self._made_by, self._sets = (), []
            placed = {name: to_torch(each).to(device) for name, each in self.inputs.items()}
            first = next(iter(placed))
            self._sets = packed(variant, {0: placed.pop(first)}, placed, copies)
            self._made_by = variant.pack, copies, device
        calls = [partial(variant.call, *each) for each in self._sets]
        return Bound(how, calls, [self.judge] * copies)


@dataclass
class DrawnProblem(Problem):
    """Inputs that are drawn on the device, for computations that are not checked."""

    #: By name.
    given: Mapping[str, Given]
    #: The workload, if there is a text of it.
    spec: WorkloadSpec | None = None

    @staticmethod
    def of(spec: WorkloadSpec) -> DrawnProblem:
        """The inputs of a workload, all cold but the first."""
        operands = enumerate(spec.operands)
        given = {each.name: Given(each.shape, each.dtype, cold=at > 0) for at, each in operands}
        return DrawnProblem(given, spec)

    def variant(self, name: str, device: str) -> Variant:
        """A way to compute its spec."""
        assert self.spec is not None
        return variants.make(name, self.spec, device)

    def bind(self, variant: Variant, how: TimingConditions, device: str) -> Bound:
        """Draw the inputs, and copy cold ones so that they are not in the L2 cache when read."""
        warm, cold = {}, {}
        for at, (name, each) in enumerate(self.given.items()):
            tensor = _draw(each, at, device, weight=at > 0)
            if each.cold:
                cold[name] = tensor
            else:
                warm[at] = tensor
        cold |= {f"own {at}": each for at, each in enumerate(variant.weights)}
        size = sum(each.nbytes for each in cold.values())
        sets = packed(variant, warm, cold, copies_needed(size, how.calls, how.l2))
        return Bound(how, [partial(variant.call, *each) for each in sets])


def packed(
    variant: Variant, warm: Mapping[int, Any], cold: Mapping[str, Any], copies: int
) -> list[list[Any]]:
    """Arguments of a variant, several sets that share warm tensors, whose places are told."""
    # What is not brought into another form is one of its copies.
    sets = [list(cold.values())] if variant.pack is pack_apart else []
    sets += [list(variant.pack(cold)) for _ in range(copies - len(sets))]
    for each in sets:
        for at, tensor in warm.items():
            each.insert(at, tensor)
    return sets


def _draw(each: Given, seed: int, device: str, *, weight: bool) -> Any:
    """A tensor of normal numbers; those of a weight are so small that sums are of order one."""
    import torch

    dtype = getattr(torch, each.dtype)
    generator = torch.Generator(device).manual_seed(seed)
    if not dtype.is_floating_point:
        # Wider integers may be places in a tensor.
        values = torch.randint(0, 2, each.shape, device=device, generator=generator)
    else:
        scale = 1 / max(1, prod(each.shape[-1:])) ** 0.5 if weight else 1.0
        values = torch.randn(each.shape, device=device, generator=generator) * scale
    values = values.to(dtype)
    if not each.stride:
        return values
    strided = torch.empty_strided(each.shape, each.stride, dtype=dtype, device=device)
    return strided.copy_(values)


def judged(limits: Tolerance, output: Any, what: str) -> tuple[float | None, str]:
    """Hold an output, a torch tensor or an array, against a rule.

    Gives the largest error over the allowed one and an empty message, or None and how the rule is
    broken, which begins with `what` was computed.
    """
    if not isinstance(output, np.ndarray):
        from crossfuse.runtime.tensors import to_numpy

        output = to_numpy(output)
    try:
        return judge(limits, output, what).worst, ""
    except CheckFailed as error:
        return None, str(error)


def make_problem(spec: WorkloadSpec, folder: Path | None = None) -> ArrayProblem:
    """Draw the inputs and find or compute the limits; equal for equal specs.

    The float64 reference is slow, so that it is stored in `folder`, if there is one, for the next
    variant of the same workload.
    """
    inputs, size = random_inputs(spec), weight_bytes(spec)
    if folder is None:
        return ArrayProblem(str(spec), inputs, tolerance(spec, inputs), size)
    path = folder / f"{hashlib.sha256(str(spec).encode()).hexdigest()}.npz"
    if not path.is_file():
        keep_limits(tolerance(spec, inputs), path)
    return ArrayProblem(str(spec), inputs, kept_limits(path, spec.out), size)


def keep_limits(limits: Tolerance, path: Path) -> None:
    """Write limits to a file, see `kept_limits`."""
    from crossfuse.files import write_atomically

    file = io.BytesIO()
    # Numpy's format does not know all types; every one but wide integers is exact in float32.
    wide = np.float32 if str(limits.unfused.dtype) in FLOAT_TYPES else np.float64
    np.savez(
        file,
        reference=limits.reference,
        unfused=limits.unfused.astype(wide),
        absolute=limits.absolute,
        norm=np.float64(limits.norm),
    )
    write_atomically(path, file.getvalue())


def kept_limits(path: Path, dtype: str) -> Tolerance:
    """Read limits that `keep_limits` wrote; `dtype` is the type of the result."""
    kind = FLOAT_TYPES[dtype].numpy if dtype in FLOAT_TYPES else np.dtype(dtype)
    stored = read_arrays(path, ("reference", "unfused", "absolute", "norm"))
    return Tolerance(
        stored["reference"],
        stored["unfused"].astype(kind),
        stored["absolute"],
        float(stored["norm"]),
    )
