"""Inputs for a compiled workload, and what its output may differ by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.workload.accuracy import Tolerance, judge, make_tolerance, tolerance
from crossfuse.workload.dtypes import FLOAT_TYPES

if TYPE_CHECKING:
    import numpy as np

    from crossfuse.compiler.source import Source


@dataclass(frozen=True)
class Problem:
    """One set of inputs.

    Attributes
    ----------
    inputs : dict[str, numpy.ndarray]
        By parameter name.
    limits : Tolerance | None
        Reference and allowed error; None where the source has no reference.
    what : str
        For messages.
    """

    inputs: dict[str, np.ndarray]
    limits: Tolerance | None
    what: str

    def judge(self, output: np.ndarray) -> str:
        """Hold an output against the limits; return the numbers as text.

        Raises
        ------
        CheckFailed
            If it is further off than the rule allows.
        """
        if self.limits is None:
            return "no reference"
        accuracy = judge(self.limits, output.reshape(self.limits.reference.shape), self.what)
        return f"error {accuracy.error:.1e}, unfused kernels {accuracy.unfused_error:.1e}"


def make_problem(source: Source, schedule: Any, seed: int = 0) -> Problem:
    """Draw random inputs and compute the float64 reference.

    Parameters
    ----------
    source : Source
        What was compiled.
    schedule : Any
        Its schedule, for the parameters of a source without a reference.
    seed : int
        Of the random numbers.

    Returns
    -------
    Problem
        Inputs of the function by name, and the tolerance.
    """
    if source.spec is not None:
        from crossfuse.workload.inputs import random_inputs

        inputs = dict(random_inputs(source.spec, seed))
        return Problem(inputs, tolerance(source.spec, inputs), str(source.spec))
    if source.module is not None:
        return _module_problem(source, seed)
    return Problem(_any_inputs(schedule, seed), None, source.summary)


def _module_problem(source: Source, seed: int) -> Problem:
    """The module itself, in float64 and in its own type, is the reference."""
    import copy

    import torch

    from crossfuse.relax.torch_import import to_numpy

    outlined, imported = source.outlined, source.imported
    assert outlined is not None
    assert imported is not None
    argument = outlined.arguments[0]
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(int(each) for each in imported.mod["main"].params[0].ty.shape)
    x = torch.randn(shape, generator=generator).to(getattr(torch, argument.dtype))
    with torch.no_grad():
        module = copy.deepcopy(source.module).cpu()
        separate = to_numpy(module(x))
        exact = to_numpy(module.double()(x.double()))
    values = outlined.arrange([to_numpy(x), *imported.params.values()])
    inputs = {each.name: value for each, value in zip(outlined.arguments, values, strict=True)}
    limits = _module_limits(exact, separate, outlined.output_dtype, outlined.N)
    return Problem(inputs, limits, source.summary)


def _module_limits(exact: np.ndarray, separate: np.ndarray, dtype: str, depth: int) -> Tolerance:
    """The rule for a computation of which only inputs and outputs are known.

    Errors are measured against the largest output: cancellation inside is not visible here.
    """
    import numpy as np

    kind = FLOAT_TYPES[dtype]
    scale = np.full(exact.shape, max(float(np.abs(exact).max()), kind.smallest))
    noise = FLOAT_TYPES["float32"].unit * np.sqrt(depth) * scale
    return make_tolerance(exact, separate, noise, kind.unit * np.abs(exact), scale)


def _any_inputs(schedule: Any, seed: int) -> dict[str, np.ndarray]:
    """Standard normal numbers for every parameter that is not written."""
    import ml_dtypes  # noqa: F401  (registers bfloat16 and fp8 with numpy)
    import numpy as np

    from crossfuse.lower.extract import buffer_specs, only_function

    generator = np.random.default_rng(seed)
    return {
        each.name: generator.standard_normal(each.shape).astype(np.dtype(each.dtype))
        for each in buffer_specs(only_function(schedule))
        if not each.output
    }
