"""Test inputs of a compiled workload, and the tolerance of its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.errors import WorkloadRefused
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.tolerances import Accuracy, Tolerance, judge, plain_tolerance, tolerance

if TYPE_CHECKING:
    import numpy as np

    from crossfuse.compiler.source import Source


@dataclass(frozen=True)
class Problem:
    """One set of inputs, by parameter name, with what judges the outputs."""

    inputs: dict[str, np.ndarray]
    #: Reference and allowed error; None where the source has no reference.
    limits: Tolerance | None
    #: Name of the workload in messages.
    what: str
    #: Gives the reference of a cascade.
    cascade: CascadeSpec | None = None

    def judge(self, outputs: Mapping[str, np.ndarray]) -> str:
        """Judge outputs, by name; the errors as text, or `CheckFailed` if one is too large."""
        if self.cascade is not None:
            from crossfuse.workload.cascade_numerics import check

            found = check(self.cascade, self.inputs, outputs)
            return "; ".join(f"{name}: {_text(each)}" for name, each in found.items())
        if self.limits is None:
            return "no reference"
        (output,) = outputs.values()
        return _text(judge(self.limits, output.reshape(self.limits.reference.shape), self.what))


def _text(accuracy: Accuracy) -> str:
    return f"error {accuracy.error:.1e}, unfused kernels {accuracy.unfused_error:.1e}"


def make_problem(source: Source, schedule: Any, seed: int = 0) -> Problem:
    """Draw random inputs and compute the float64 reference.

    The schedule gives the parameters of a source that has no function.
    """
    if source.spec is not None:
        from crossfuse.workload.numerics import random_inputs

        inputs = dict(random_inputs(source.spec, seed))
        return Problem(inputs, tolerance(source.spec, inputs), str(source.spec))
    if source.cascade is not None:
        from crossfuse.workload.cascade_numerics import random_inputs as draw_cascade

        values = dict(draw_cascade(source.cascade, seed))
        return Problem(values, None, str(source.cascade), source.cascade)
    if source.module is not None:
        return _module_problem(source, seed)
    if source.func is not None:
        return _function_problem(source, seed)
    from crossfuse.emulate.llvm import draw, parameters

    return Problem(draw(parameters(schedule), seed), None, source.summary)


def _module_problem(source: Source, seed: int) -> Problem:
    """A problem whose reference is the module itself, in float64 and in its own type."""
    import copy

    import torch

    from crossfuse.runtime.tensors import to_numpy

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
    limits = plain_tolerance(exact, separate, outlined.N)
    return Problem(inputs, limits, source.summary)


def _function_problem(source: Source, seed: int) -> Problem:
    """A problem whose reference is the function itself, in float64 and as it rounds."""
    from crossfuse.emulate.llvm import draw, limits, parameters

    inputs = draw(parameters(source.func), seed)
    try:
        found = limits(source.func, inputs)
    except WorkloadRefused:
        # Not everything has a result in float64; kernels of it run all the same.
        found = None
    return Problem(inputs, found, source.summary)
