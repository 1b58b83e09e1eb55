"""Functions without a spec: their names, and the references of their kernels' results.

A candidate is a scheduled function, which no longer says what it was made of. So the rules that
schedule write the name of the function into the trace, as an annotation of the root block; the
builder puts the function beside the library, and the runner has its reference computed once::

    crossfuse.function = "function:1f0c6e3b9a7d5240"
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossfuse.bench.problem import ArrayProblem, keep_limits, kept_limits
from crossfuse.emulate.reference import Parameter, draw, limits, parameters, the_output
from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.files import read_text, sha256, write_atomically
from crossfuse.schema import Damaged, read

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
