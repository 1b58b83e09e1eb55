"""Compiles and runs the micro-benchmarks of the planner on the GPU of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from crossfuse.errors import EnvironmentRefused, RefusedError, refuse
from crossfuse.planner.calibration.programs import PROGRAMS, SOURCES, Program, assemble, parse
from crossfuse.planner.cost.rates import Measured
from crossfuse.runtime.nvcc import NvccInfo, find_host_compiler, find_nvcc

#: compute_90a and not compute_90, which has neither wgmma nor multicast at full speed.
_FLAGS = ("-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a")
_COMPILE_S = 300.0
RUN_S = 60.0
"""Seconds after which a program is stopped; each takes a few."""


def build(program: Program, directory: Path, nvcc: NvccInfo | None = None) -> Path:
    """Compile a program and its generated headers in a directory of its own, to an executable.

    It is refused if there is no compiler, or the compiler fails or so much as warns.
    """
    nvcc = nvcc or find_nvcc()
    place = directory / program.name
    place.mkdir(parents=True, exist_ok=True)
    for name, text in program.headers.items():
        (place / name).write_text(text, encoding="utf-8")
    executable = place / "run"
    # The wheels of PyPI keep the runtime in lib, where their nvcc does not look.
    libraries = [f"-L{each.parent / 'lib'}" for each in nvcc.include_dirs if each.name == "include"]
    command = [str(nvcc.path), *_FLAGS, "-ccbin", str(find_host_compiler()), f"-I{place}"]
    command += [*libraries, str(SOURCES / program.source), "-o", str(executable)]
    done = _run(command, _COMPILE_S, program)
    said = (done.stdout + done.stderr).strip()
    if done.returncode != 0 or "warning" in said:
        raise _refuse(program, said, "a compilation without errors and warnings")
    return executable


def measure(program: Program, executable: Path, timeout: float = RUN_S) -> list[dict[str, Any]]:
    """Run a program in a process of its own; returns the lines that it prints, parsed.

    It is refused if it fails, is still running after `timeout` seconds, or prints something else.
    """
    done = _run([str(executable)], timeout, program)
    if done.returncode != 0:
        found = f"exit code {done.returncode}: {done.stderr.strip()}"
        raise _refuse(program, found, "a run on an idle GPU of compute capability 9.0")
    return parse(done.stdout, program.name)


def calibrate(
    device: str,
    machine: Callable[[], dict[str, Any]],
    programs: Iterable[Program] = PROGRAMS,
    note: Callable[[str], None] = lambda line: None,
) -> Measured:
    """Measure the GPU of this machine with all micro-benchmarks, for the record of `device`.

    They are compiled in parallel, then run one after another. `machine` describes the machine; it
    is called after the measurement, while clocks are still up. `note` hears of each step. A program
    that does not compile or run, or an absurd result, is refused.
    """
    programs = tuple(programs)
    nvcc = find_nvcc()
    with (
        tempfile.TemporaryDirectory(prefix="crossfuse-calibrate-") as scratch,
        ThreadPoolExecutor(max_workers=os.cpu_count()) as pool,
    ):
        built = [pool.submit(build, each, Path(scratch), nvcc) for each in programs]
        # All of them first: a compiler at work would slow the host side of a measurement.
        wait(built)
        note(f"{len(programs)} programs compiled")
        lines, fault = _measure_all(zip(programs, built, strict=True), note)
    if fault is not None:
        raise fault
    return assemble(device, lines, machine())


def _measure_all(
    built: Iterable[tuple[Program, Future[Path]]], note: Callable[[str], None]
) -> tuple[list[dict[str, Any]], RefusedError | None]:
    """Lines of all programs that run, and the first fault: other results are worth knowing."""
    lines: list[dict[str, Any]] = []
    fault = None
    for program, executable in built:
        try:
            found = measure(program, executable.result())
        except RefusedError as error:
            fault = fault or error
            note(str(error))
            continue
        lines += found
        for line in found:
            note(json.dumps(line))
    return lines, fault


def _run(command: list[str], timeout: float, program: Program) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise _refuse(program, f"no end after {timeout:g} s", "an idle GPU") from None


def _refuse(program: Program, found: str, limit: str) -> RefusedError:
    return refuse(
        EnvironmentRefused,
        "calibration",
        f"program {program.name} ({program.source})",
        found=found,
        limit=limit,
        instead="repair what the message says; crossfuse doctor shows the compiler and the GPU",
    )
