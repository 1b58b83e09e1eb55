"""Every check of a compiled kernel, as a list of verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.calls import Seed, checked
from crossfuse.compiler.problem import Problem, make_problem
from crossfuse.errors import EnvironmentRefused, RefusedError

if TYPE_CHECKING:
    import numpy as np

    from crossfuse.compiler.compiled import Compiled

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
    """Judge one run, and compare the others with it bit by bit."""
    image = compiled.lowered.image
    arrays = [problem.inputs[each.name] for each in image.buffers if not each.output]
    names = [each.name for each in image.buffers if each.output]

    def run() -> dict[str, np.ndarray]:
        found = compiled.kernel.run(*arrays)
        return dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))

    first = run()
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
