"""Inputs of a workload and what its output may be off by, worked out once for all variants."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crossfuse.errors import CheckFailed
from crossfuse.workload.accuracy import Tolerance, judge, tolerance
from crossfuse.workload.dtypes import float_type
from crossfuse.workload.inputs import random_inputs
from crossfuse.workload.spec import WorkloadSpec


@dataclass(frozen=True)
class Problem:
    """One set of random inputs.

    Attributes
    ----------
    spec : WorkloadSpec
        What is computed.
    inputs : dict[str, numpy.ndarray]
        By name.
    limits : Tolerance
        The float64 reference and the rule.
    """

    spec: WorkloadSpec
    inputs: dict[str, np.ndarray]
    limits: Tolerance

    def judge(self, output: Any) -> tuple[float | None, str]:
        """Hold an output against the rule.

        Parameters
        ----------
        output : torch.Tensor
            The result.

        Returns
        -------
        worst : float | None
            Largest error over the allowed one; None where the rule is broken.
        message : str
            How it is broken; else empty.
        """
        from crossfuse.relax.torch_import import to_numpy

        try:
            return judge(self.limits, to_numpy(output), str(self.spec)).worst, ""
        except CheckFailed as error:
            return None, str(error)


def make_problem(spec: WorkloadSpec, folder: Path | None = None) -> Problem:
    """Draw the inputs and find or compute the limits.

    Parameters
    ----------
    spec : WorkloadSpec
        What is computed.
    folder : pathlib.Path | None
        Where limits are kept for the next variant of the same workload.

    Returns
    -------
    Problem
        Equal for equal specs.
    """
    inputs = random_inputs(spec)
    if folder is None:
        return Problem(spec, inputs, tolerance(spec, inputs))
    path = folder / f"{hashlib.sha256(str(spec).encode()).hexdigest()}.npz"
    if not path.is_file():
        _save(tolerance(spec, inputs), path)
    return Problem(spec, inputs, _load(path, spec))


def _save(limits: Tolerance, path: Path) -> None:
    from crossfuse.runtime.files import write_atomically

    file = io.BytesIO()
    # Every output type is exact in float32, and numpy's format does not know them all.
    np.savez(
        file,
        reference=limits.reference,
        unfused=limits.unfused.astype(np.float32),
        absolute=limits.absolute,
        norm=np.float64(limits.norm),
    )
    write_atomically(path, file.getvalue())


def _load(path: Path, spec: WorkloadSpec) -> Tolerance:
    with np.load(path) as stored:
        return Tolerance(
            stored["reference"],
            stored["unfused"].astype(float_type(spec.out).numpy),
            stored["absolute"],
            float(stored["norm"]),
        )
