"""Inputs of a workload and the allowed error of its output, worked out once for all variants."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crossfuse.bench.floor import weight_bytes
from crossfuse.errors import CheckFailed
from crossfuse.npz import read_arrays
from crossfuse.workload.accuracy import judge
from crossfuse.workload.dtypes import FLOAT_TYPES
from crossfuse.workload.inputs import random_inputs
from crossfuse.workload.spec import WorkloadSpec
from crossfuse.workload.tolerances import Tolerance, tolerance


@dataclass(frozen=True)
class Problem:
    """One set of random inputs, and what a result is checked against."""

    #: What is computed: text of a spec, or the name of a function.
    what: str
    #: By name, in the order of the parameters; the weights come after the first.
    inputs: dict[str, np.ndarray]
    #: The float64 reference and the rule.
    limits: Tolerance
    #: Bytes that one computation reads of weights.
    weight_bytes: int

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


def make_problem(spec: WorkloadSpec, folder: Path | None = None) -> Problem:
    """Draw the inputs and find or compute the limits; equal for equal specs.

    The float64 reference is slow, so that it is stored in `folder`, if there is one, for the next
    variant of the same workload.
    """
    inputs, size = random_inputs(spec), weight_bytes(spec)
    if folder is None:
        return Problem(str(spec), inputs, tolerance(spec, inputs), size)
    path = folder / f"{hashlib.sha256(str(spec).encode()).hexdigest()}.npz"
    if not path.is_file():
        keep_limits(tolerance(spec, inputs), path)
    return Problem(str(spec), inputs, kept_limits(path, spec.out), size)


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
