"""Compiles and runs the micro-benchmarks of the planner on the GPU of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossfuse import schema
from crossfuse.errors import EnvironmentRefused, RefusedError, refuse
from crossfuse.planner.cost.rates import VERSION, Measured, read
from crossfuse.runtime.nvcc import NvccInfo, find_host_compiler, find_nvcc
from crossfuse.schema import Damaged, typed

# The micro-benchmarks of a calibration, and the fields of a record that their output fills.

# The benchmark of the tensor cores: CUDA text of a wgmma instruction for each tile width.


@dataclass(frozen=True)
class ElementType:
    """An element type of wgmma's operands."""

    #: Name in PTX.
    ptx: str
    #: Elements that one instruction reduces over: always 32 bytes.
    k: int
    #: Bits of a random word that may be set: two or four numbers below 2 in magnitude.
    numbers: int


TYPES = {
    # Sign, all exponent bits but the highest (so no infinities), mantissa.
    "bfloat16": ElementType("bf16", 16, 0xBFFFBFFF),
    "float16": ElementType("f16", 16, 0xBFFFBFFF),
    "float8_e4m3fn": ElementType("e4m3", 32, 0xBFBFBFBF),
}
COLUMNS = (8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256)
"""Columns of a tile that are measured; those between are interpolated."""


def products(dtype: str, columns: tuple[int, ...] = COLUMNS) -> str:
    """Write the header ``products.cuh`` of one element type.

    It has a class template ``Product<columns>`` whose ``run`` is one wgmma (PTX ISA 8.0,
    wgmma.mma_async), the measured widths and the name of the type. Tiles are multiples of 8 columns
    wide, up to 256.
    """
    kind = TYPES[dtype]
    head = f"""\
#pragma once
#include <cstdint>

constexpr const char* kTypeName = "{dtype}";
constexpr int kElementBytes = {32 // kind.k};
constexpr uint32_t kNumbers = {kind.numbers:#x}u;

template <int... kColumns>
struct Columns {{}};
using MeasuredColumns = Columns<{", ".join(map(str, columns))}>;

template <int kColumns>
struct Product;
"""
    return head + "".join(_product(kind, each) for each in columns)


def _product(kind: ElementType, columns: int) -> str:
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    registers = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    # Types of 8 bits have K-major operands alone, and so no say about it.
    layouts = ", 0, 0" if kind.k == 16 else ""
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k{kind.k}.f32.{kind.ptx}.{kind.ptx}"
    return f"""
template <>
struct Product<{columns}> {{
  static __device__ __forceinline__ void run(float (&sums)[{count}], uint64_t left,
                                             uint64_t right) {{
    asm volatile(
        "{name} {{{sums}}}, %{count}, %{count + 1}, 1, 1, 1{layouts};"
        : {registers}
        : "l"(left), "l"(right));
  }}
}};
"""


SOURCES = Path(__file__).parent / "cuda"
"""Directory of the CUDA programs."""

#: CTAs of the cluster whose DSM latency counts.
_DSM_CLUSTER = 4


@dataclass(frozen=True)
class Program:
    """One CUDA program: a file of `SOURCES`, and headers that are written beside it."""

    #: Of the executable, and in messages.
    name: str
    source: str
    #: Text by file name.
    headers: Mapping[str, str]


PROGRAMS = (
    # The slowest to compile first.
    *(Program(f"tensor-{each}", "tensor.cu", {"products.cuh": products(each)}) for each in TYPES),
    *(
        Program(each, f"{each}.cu", {})
        for each in ("memory", "ingest", "dsm", "latency", "barrier", "flag", "launch")
    ),
)

# Scalars of a record by name of a line, where the line has no keys.
_SCALARS = (
    "hbm_read",
    "hbm_write",
    "l2_read",
    "l2_write",
    "sm_ingest",
    "sm_ingest_all",
    "hbm_ingest_all",
    "flag",
    "launch",
    "early_launch",
)
# Tables of a record by name of a line, with the keys before the value.
_TABLES = {
    "multicast_ingest": ("size",),
    "multicast_ingest_one": ("size",),
    "cluster_barrier": ("size",),
    "resident": ("size",),
    "tensor": ("rows", "columns", "dtype"),
}


@dataclass(frozen=True)
class _Line:
    """Fields of every line of output; lines of tables have their keys besides."""

    name: str
    value: float
    spread: float


def parse(text: str, program: str) -> list[dict[str, Any]]:
    """Read the lines that a program printed: one JSON object each, see ``cuda/harness.h``.

    No line at all is refused too: the program must have failed. `program` is its name in refusals.
    """
    lines: list[dict[str, Any]] = []
    for line in filter(str.strip, text.splitlines()):
        try:
            found = typed(Mapping[str, str | float], schema.parse(line))
            typed(_Line, {each: found.get(each) for each in ("name", "value", "spread")})
        except Damaged:
            raise _refuse_output(program, repr(line[:200])) from None
        lines.append(dict(found))
    if not lines:
        raise _refuse_output(program, "no lines")
    return lines


def assemble(
    device: str, lines: Iterable[Mapping[str, Any]], machine: Mapping[str, Any]
) -> Measured:
    """Make the record of a device from the lines of all programs.

    The spread of a table is that of its worst row. Missing and absurd numbers are refused by
    `crossfuse.planner.cost.rates.read`.
    """
    found: dict[str, Any] = {}
    spread: dict[str, float] = {}
    for line in lines:
        name, entry = _entry(line)
        if name is None:
            continue
        if isinstance(entry, list):
            found.setdefault(name, []).append(entry)
        else:
            found[name] = entry
        spread[name] = round(max(spread.get(name, 0.0), line["spread"]), 4)
    head = {"name": device, "provisional": False, "version": VERSION, "machine": dict(machine)}
    return read({**found, **head, "spread": spread}, f"measurement of {device}")


def _entry(line: Mapping[str, Any]) -> tuple[str | None, Any]:
    """Find the field of a record that a line fills, and its number or row; None if not used."""
    name, value = line["name"], line["value"]
    if name in _SCALARS:
        return name, value
    if name in _TABLES:
        # Clusters are counted.
        value = int(value) if name == "resident" else value
        return name, [*(line.get(key) for key in _TABLES[name]), value]
    if name == "dsm_push":
        field = name if line.get("method") == "st.async" else f"{name}_bulk"
        return field, [line.get("size"), value]
    if name == "latency" and line.get("size", _DSM_CLUSTER) == _DSM_CLUSTER:
        return line.get("level"), value
    return None, None


def _refuse_output(program: str, found: str) -> RefusedError:
    return refuse(
        EnvironmentRefused,
        "calibration-output",
        f"program {program}",
        found=found,
        limit='lines of JSON with "name", "value" and "spread"',
        instead="run the program by itself and look at its output",
    )


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
