"""Every check of a compiled kernel, as a list of verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.calls import Seed, checked
from crossfuse.errors import EnvironmentRefused, RefusedError, WorkloadRefused
from crossfuse.workload.accuracy import Accuracy, judge
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.tolerances import Tolerance, plain_tolerance, tolerance

if TYPE_CHECKING:
    import numpy as np

    from crossfuse.compiler.compiled import Compiled
    from crossfuse.compiler.source import Source


# Test inputs of a compiled workload, and the tolerance of its output.


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
            from crossfuse.workload.cascade_inputs import check

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
        from crossfuse.workload.inputs import random_inputs

        inputs = dict(random_inputs(source.spec, seed))
        return Problem(inputs, tolerance(source.spec, inputs), str(source.spec))
    if source.cascade is not None:
        from crossfuse.workload.cascade_inputs import random_inputs as draw_cascade

        values = dict(draw_cascade(source.cascade, seed))
        return Problem(values, None, str(source.cascade), source.cascade)
    if source.module is not None:
        return _module_problem(source, seed)
    if source.func is not None:
        return _function_problem(source, seed)
    from crossfuse.emulate.reference import draw, parameters

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
    from crossfuse.emulate.reference import draw, limits, parameters

    inputs = draw(parameters(source.func), seed)
    try:
        found = limits(source.func, inputs)
    except WorkloadRefused:
        # Not everything has a result in float64; kernels of it run all the same.
        found = None
    return Problem(inputs, found, source.summary)


# Every check of a compiled kernel, as a list of verdicts.

#: Runs on the GPU that must agree bit by bit.
REPEATS = 100


@dataclass(frozen=True)
class Verdict:
    """Outcome of one check.

    Attributes
    ----------
    name : str
        What was checked.
    status : str
        "passed", "failed", or "skipped" where the machine lacks what it needs.
    detail : str
        Numbers, or what is wrong.
    seconds : float
        Wall time.

    Examples
    --------
    >>> Verdict("cubin", "passed", "no spills", 0.1).status
    'passed'
    """

    name: str
    status: str
    detail: str
    seconds: float


@checked
def check(compiled: Any, *, seed: Seed = 0, gpu: bool = True) -> tuple[Verdict, ...]:
    """Run every checker on random inputs.

    Parameters
    ----------
    compiled : Compiled | Any
        The kernel, or what `crossfuse.compile` makes one of without options. Both CPU checkers
        execute every operation of it: take small shapes.
    seed : int
        Of the inputs and of the emulator's thread orders.
    gpu : bool
        Whether to run it on the GPU, if there is one.

    Returns
    -------
    tuple[Verdict, ...]
        Schedule on LLVM, generated CUDA emulated, resources of the cubin, the GPU.

    Examples
    --------
    >>> import crossfuse
    >>> kernel = crossfuse.compile("gemm:M=16,K=64,N=16")
    >>> {each.status for each in crossfuse.check(kernel, gpu=False)}
    {'passed'}
    """
    from crossfuse.compiler.compiled import Compiled, compile

    if not isinstance(compiled, Compiled):
        compiled = compile(compiled)
    problem = make_problem(compiled.source, compiled.schedule, seed)
    checks: list[tuple[str, Callable[[], str]]] = [
        ("schedule, run on LLVM", lambda: _sequential(compiled, problem)),
        ("generated CUDA, emulated", lambda: _emulated(compiled, problem, seed)),
        ("cubin for sm_90a", lambda: _resources(compiled)),
    ]
    if gpu:
        checks.append((f"GPU, {REPEATS} runs", lambda: _on_gpu(compiled, problem)))
    return tuple(_run(name, body) for name, body in checks)


def _run(name: str, body: Callable[[], str]) -> Verdict:
    start = time.perf_counter()
    try:
        status, detail = "passed", body()
    except EnvironmentRefused as error:
        status, detail = "skipped", f"{error.refusal.found}; {error.refusal.instead}"
    except RefusedError as error:
        status, detail = "failed", str(error)
    return Verdict(name, status, detail, time.perf_counter() - start)


def _sequential(compiled: Compiled, problem: Problem) -> str:
    from crossfuse.emulate.llvm import run_sequential

    report = run_sequential(compiled.schedule, problem.inputs)
    report.raise_if_wrong()
    return f"{problem.judge(report.outputs)}; forwards = backwards"


def _emulated(compiled: Compiled, problem: Problem, seed: int) -> str:
    from crossfuse.emulate.cuda import emulate

    report = emulate(compiled.lowered.image, problem.inputs, seed=seed)
    report.raise_if_wrong()
    for outputs in report.later:
        problem.judge(outputs)
    return f"{problem.judge(report.outputs)}; no race, no stray access, two thread orders"


def _resources(compiled: Compiled) -> str:
    parts = []
    for usage in compiled.artefact.manifest.resources:
        parts.append(f"{usage.registers} registers, {usage.spill_bytes} bytes spilled")
    return "; ".join(parts)


def _on_gpu(compiled: Compiled, problem: Problem) -> str:
    """Judge one run, and compare the others with it bit by bit; judge all if sums have no order."""
    image = compiled.lowered.image
    arrays = [problem.inputs[each.name] for each in image.buffers if not each.output]
    names = [each.name for each in image.buffers if each.output]

    def run() -> dict[str, np.ndarray]:
        found = compiled.kernel.run(*arrays)
        return dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))

    first = run()
    if image.unordered:
        for _ in range(REPEATS - 1):
            problem.judge(run())
        return f"{problem.judge(first)}; all runs within it, sums in no order"
    bits = [each.tobytes() for each in first.values()]
    for _ in range(REPEATS - 1):
        if [each.tobytes() for each in run().values()] != bits:
            from crossfuse.errors import CheckFailed, refuse

            raise refuse(
                CheckFailed,
                "gpu",
                compiled.source.summary,
                found="different bits in two runs on the same inputs",
                limit=f"{REPEATS} equal results",
                instead="emulate the kernel: it reports races by statement",
            )
    return f"{problem.judge(first)}; all equal bit by bit"
