"""Running an emulation: arguments in, a subprocess, outputs and a report of findings out."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crossfuse.calls import AtLeastOne, Seconds, Seed, checked
from crossfuse.emulate.cuda.arguments import (
    check_image,
    image_of_call,
    inputs_by_name,
    numpy_dtype,
)
from crossfuse.emulate.cuda.build import build
from crossfuse.emulate.cuda.translate import Translation, find_statements, translate
from crossfuse.errors import CheckFailed, EnvironmentRefused, refuse
from crossfuse.files import scratch
from crossfuse.lower.image import ROW_COUNT, KernelImage
from crossfuse.schema import parse

# The report, as plain values.

#: Every kind of finding.
KINDS = (
    "race",
    "out-of-bounds",
    "uninitialised-read",
    "unwritten-output",
    "write-to-input",
    "early-exit",
    "early-launch",
    "peer-not-started",
    "deadlock",
    "async-race",
    "register-race",
    "mbarrier",
    "barrier-divergence",
    "bad-rank",
    "misaligned",
    "tensor-map",
    "order-dependent",
    "crash",
    "timeout",
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a kernel.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    buffer : str
        Name of the argument or of the static shared array, ``"shared memory"`` for the dynamic
        one, empty where no buffer is concerned.
    index : int
        Position in `unit` from the start of the buffer; -1 without a buffer.
    unit : str
        ``"element"`` for an argument (flat, row-major), ``"byte"`` for shared memory.
    first : str
        The statement at fault, as ``"line N: text"`` of the generated text; of a race, the access
        that came first in this emulation. Empty where no statement is.
    second : str
        The other statement of a race or of diverging barriers.
    cta : int
        CTA of the thread at fault, counted x first over the grid; -1 if no thread is.
    thread : int
        Thread within that CTA, counted x first; -1 if no thread is.
    detail : str
        What happened, in words.

    Examples
    --------
    >>> print(Finding("race", "out", 3, "element", "line 7: out[i] = x", "", 0, 5, "no barrier"))
    race at element 3 of out in `line 7: out[i] = x` (CTA 0, thread 5): no barrier.
    """

    kind: str
    buffer: str
    index: int
    unit: str
    first: str
    second: str
    cta: int
    thread: int
    detail: str

    def __str__(self) -> str:
        place = f" at {self.unit} {self.index} of {self.buffer}" if self.buffer else ""
        statements = " and ".join(f"`{s}`" for s in (self.first, self.second) if s)
        actor = f" (CTA {self.cta}, thread {self.thread})" if self.thread >= 0 else ""
        where = f" in {statements}" if statements else ""
        return f"{self.kind}{place}{where}{actor}: {self.detail}."


@dataclass(frozen=True)
class EmulationReport:
    """Result of an emulation.

    Attributes
    ----------
    name : str
        Name of the emulated function.
    outputs : Mapping[str, np.ndarray]
        Every output of the first run by name; elements that were never written hold all-ones bytes.
        Empty after a crash, a timeout or a deadlock.
    findings : tuple[Finding, ...]
        What is wrong; empty for a correct kernel.
    seconds : float
        Wall time, compilation included.
    launches : int
        Kernel launches of one run.
    later : tuple[Mapping[str, np.ndarray], ...]
        The same of further runs, in other orders; empty ones behind a run with findings.
    at_once : int
        Most launches that ran at the same time in any order: more than 1 where some start early.

    Examples
    --------
    >>> out = np.zeros(4, np.float32)  # [4]
    >>> race = Finding("race", "out", 3, "element", "line 7: out[i] = x", "", 0, 5, "no barrier")
    >>> report = EmulationReport("copy", {"out": out}, (race,), seconds=0.1, launches=1)
    >>> report.ok
    False
    >>> report.raise_if_wrong()
    Traceback (most recent call last):
    ...
    crossfuse.errors.CheckFailed: emulation: copy: found 1 finding(s): race at element 3 of out ...
    """

    name: str
    outputs: Mapping[str, np.ndarray]
    findings: tuple[Finding, ...]
    seconds: float
    launches: int
    later: tuple[Mapping[str, np.ndarray], ...] = ()
    at_once: int = 1

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def raise_if_wrong(self) -> None:
        """Raise if anything was found.

        Raises
        ------
        CheckFailed
            Its text has the first three findings.
        """
        if self.ok:
            return
        shown = " ".join(str(finding) for finding in self.findings[:3])
        rest = len(self.findings) - 3
        more = f" And {rest} more." if rest > 0 else ""
        raise refuse(
            CheckFailed,
            "emulation",
            self.name,
            found=f"{len(self.findings)} finding(s): {shown}{more}".rstrip("."),
            limit="no finding",
            instead="correct the schedule, the edit or the lowering that these statements come "
            "from; docs/troubleshooting.md says what to do about each kind",
        )


# Runs.

# The runtime keeps more than is asked for: some turn out to be one statement, copied by g++.
_SPARE_FINDINGS = 64
# What the runtime may take beyond its own alarm before it is killed.
_GRACE_S = 10.0
_ATTEMPTS = 20
# Exit status of a runtime that lacks memory, disk or address space.
_NO_MEANS = 3
# What the runtime calls the argument that is the number of rows.
_ROW_COUNT = -1000000
# What the runtime calls a buffer that is zero at first and kept; inputs are 0 and outputs are 1.
_STATE = 2
# What it calls one that kernels write for each other alone.
_WINDOW = 3
# What orders accesses by more than barriers of CTAs and clusters, which the runtime counts.
_ORDERS_BY_CLOCKS = ("mbarrier.", "cp.async.bulk", "wgmma.", "fence.proxy", "bar.arrive")
# Records of the runtime that say nothing of a fault.
_NO_FINDINGS = ("stopped", "at-once")
# A record of the runtime about no place and no thread.
_NOWHERE: dict[str, Any] = {
    **{"shared": "", "argument": -1, "offset": -1, "in_shared": 0},
    **{"first": 0, "second": 0, "cta": -1, "thread": -1},
}


@checked
def emulate(
    image: KernelImage,
    arguments: Mapping[str, np.ndarray] | Sequence[np.ndarray],
    *,
    seed: Seed = 0,
    orders: AtLeastOne = 2,
    max_findings: AtLeastOne = 8,
    timeout_s: Seconds = 120.0,
    cache: str | os.PathLike[str] | None = None,
) -> EmulationReport:
    """Run generated CUDA on the CPU and report what is wrong with it.

    Every CUDA thread is a fiber; clusters run one after another, in random order, and those of a
    cooperative launch at the same time; those of a launch that helps both ways, in every other
    order. Each access to shared or global memory is checked for bounds, alignment, initialisation
    and races. Whether two accesses race follows from the barriers between them and not from the
    order in which they ran; clusters of a cooperative launch are ordered by the releases and
    acquires of flags in global memory. Copies by TMA read and write until they are waited for, and
    need a proxy fence after what others wrote, and after the last load of what they overwrite.
    Launches run one after another, and what one that starts early touches before it waits is held
    against all that those before it touch; in every other order it runs beside them, from where all
    CTAs of the one before it let it begin.
    State is zero before the first order and kept for the next one, which is a second call of the
    function. Outputs of all orders are equal bit by bit, unless the image says that it adds in no
    order.

    Parameters
    ----------
    image : KernelImage
        Generated CUDA, its launches and buffers.
    arguments : mapping or sequence of np.ndarray
        Inputs by name, or in the order of the buffers: only the inputs, or all buffers. Outputs
        need not be given; they start as all-ones bytes whatever is given. Kernels that take fewer
        rows run on as many as the inputs have, and nothing lies behind these rows.
    seed : int
        Of the thread and cluster orders.
    orders : int
        Runs with different orders; a run with findings is the last one.
    max_findings : int
        Findings to report at most.
    timeout_s : float
        Seconds after which the emulation is stopped, compilation not included.
    cache : path, optional
        Directory for compiled kernels; the user's cache directory by default.

    Returns
    -------
    EmulationReport
        Outputs of all runs, and findings.

    Raises
    ------
    ArtefactRefused
        If the arguments do not fit the image.
    CheckFailed
        If the image contradicts itself, or its text is not C++ that the emulator can compile.
    EnvironmentRefused
        If there is no g++.

    Examples
    --------
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.threads import schedule_split_k
    >>> from crossfuse.workload import check, parse, prim_func, random_inputs
    >>> spec = parse("gemm:M=16,K=64,N=16")
    >>> inputs = random_inputs(spec)
    >>> report = emulate(lower(schedule_split_k(prim_func(spec), cluster=4)).image, inputs)
    >>> report.ok, check(spec, inputs, report.outputs["out"]).worst <= 1
    (True, True)
    """
    start = time.perf_counter()
    report = examine(prepare(image, arguments, cache), seed, orders, max_findings, timeout_s)
    return replace(report, seconds=time.perf_counter() - start)


def examine(
    program: Program, seed: int, orders: int, max_findings: int, timeout_s: float
) -> EmulationReport:
    """Run a compiled program as `emulate` does."""
    start = time.perf_counter()
    limit = max_findings + _SPARE_FINDINGS
    records, runs = program.run(seed, max(orders, 1), limit, timeout_s)
    image = program.image
    at_once = max((each["launches"] for each in records if each["kind"] == "at-once"), default=1)
    findings = _findings(records, program.executable, program.translation, image)[:max_findings]
    elapsed = time.perf_counter() - start
    launches = len(image.launches)
    return EmulationReport(image.name, runs[0], findings, elapsed, launches, runs[1:], at_once)


@dataclass(frozen=True)
class Program:
    """A compiled image with the inputs of a call."""

    #: Cut to the rows of the call.
    image: KernelImage
    inputs: Mapping[str, np.ndarray]
    translation: Translation
    executable: Path
    #: Of each launch, the stream in which it follows others; empty if all follow each other.
    streams: tuple[int, ...] = ()

    def run(
        self,
        seed: int,
        orders: int,
        limit: int,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[list[dict[str, Any]], tuple[dict[str, np.ndarray], ...]]:
        """Run in several thread orders: the runtime's records, and the outputs of each order.

        `limit` is the maximum number of findings; `environment` extends that of the executable.
        """
        settings = (seed, orders, limit, max(1, round(timeout_s)))
        with scratch() as directory:
            job = (self.image, self.translation, self.inputs, settings, self.streams)
            _write_job(directory, *job)
            records = _execute(self.executable, directory, timeout_s, environment)
            runs = (_read_outputs(directory, self.image, order) for order in range(orders))
            return records, tuple(runs)


def prepare(
    image: KernelImage,
    arguments: Mapping[str, np.ndarray] | Sequence[np.ndarray],
    cache: str | os.PathLike[str] | None = None,
) -> Program:
    """Check and compile an image for arguments, as `emulate` does."""
    check_image(image)
    image = image_of_call(image, arguments)
    inputs = inputs_by_name(image, arguments)
    translation = translate(image)
    return Program(image, inputs, translation, build(translation, image.name, cache))


def _write_job(
    directory: Path,
    image: KernelImage,
    translation: Translation,
    inputs: Mapping[str, np.ndarray],
    settings: tuple[int, ...],
    streams: tuple[int, ...],
) -> None:
    position = {buffer.name: index for index, buffer in enumerate(image.memory)}
    known = position | {ROW_COUNT: _ROW_COUNT}
    words = [*settings, max(streams, default=0) + 1]
    words += [len(image.memory), len(image.launches)]
    lines = [" ".join(map(str, words))]
    state = {buffer.name for buffer in image.state}
    clocked = any(each in image.cuda for each in _ORDERS_BY_CLOCKS)
    for index, buffer in enumerate(image.memory):
        item = numpy_dtype(buffer.dtype).itemsize
        elements = int(np.prod(buffer.shape, dtype=np.int64))
        role = _WINDOW if buffer.ranks else int(buffer.output)
        role = _STATE if buffer.name in state else role
        lines.append(f"{buffer.name} {role} {elements * item} {item}")
        if role == 0:
            inputs[buffer.name].tofile(directory / f"input_{index}.bin")
    for launch, stream in zip(image.launches, streams or [0] * len(image.launches), strict=True):
        kernel = translation.symbols.index(launch.symbol)
        numbers = [kernel, *map(int, (launch.cooperative, launch.helps, launch.early, clocked))]
        numbers += [image.rows or 0, stream]
        numbers += [*launch.grid, *launch.block, *launch.cluster]
        numbers += [launch.dynamic_shared_bytes, len(launch.arguments)]
        maps = [each.name for each in launch.tensor_maps]
        numbers += [
            -1 - maps.index(name) if name in maps else known[name] for name in launch.arguments
        ]
        lines.append(" ".join(map(str, (*numbers, len(maps)))))
        for each in launch.tensor_maps:
            item = numpy_dtype(image.memory[position[each.buffer]].dtype).itemsize
            row = (
                len(each.extents),
                *each.extents,
                *each.strides,
                *each.box[:3],
                *(1 for _ in range(3 - len(each.box))),
                each.swizzle,
                item,
            )
            row = (*row, int(each.pixels is not None))
            corners = () if each.pixels is None else (*each.pixels.lower, *each.pixels.upper)
            lines.append(" ".join(map(str, (position[each.buffer], *row, *corners))))
    (directory / "job.txt").write_text("\n".join(lines) + "\n")


def _execute(
    executable: Path, directory: Path, timeout_s: float, environment: Mapping[str, str] | None
) -> list[dict[str, Any]]:
    status, log = _start(executable, directory, timeout_s + _GRACE_S, environment)
    if status == _NO_MEANS:
        raise refuse(
            EnvironmentRefused,
            "emulate-run",
            str(executable),
            found=log,
            limit="address space and disk for all buffers",
            instead="emulate a smaller problem, or lift the limits of this process (ulimit -v)",
        )
    path = directory / "findings.jsonl"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    records = [parse(line, finite=False) for line in text.splitlines() if line.endswith("}")]
    if status is None:
        detail = "the emulation did not stop when its time was up"
        records.append({**_NOWHERE, "kind": "timeout", "detail": detail})
    elif status != 0:
        cause = f"signal {-status}" if status < 0 else f"exit status {status}"
        detail = f"the emulation ended with {cause} {log}".rstrip()
        records.append({**_NOWHERE, "kind": "crash", "detail": detail})
    return records


def _start(
    executable: Path, directory: Path, timeout_s: float, environment: Mapping[str, str] | None
) -> tuple[int | None, str]:
    """Run the executable; the exit status is None if it had to be killed."""
    for _ in range(_ATTEMPTS):
        try:
            done = subprocess.run(
                [str(executable)],
                cwd=directory,
                capture_output=True,
                timeout=timeout_s,
                check=False,
                env={**os.environ, **(environment or {})},
            )
            return done.returncode, done.stderr.decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            return None, ""
        except OSError as error:
            if error.errno != errno.ETXTBSY:
                return _NO_MEANS, str(error)
            # A process that another thread is just starting still holds the file open.
            time.sleep(0.05)
    return _NO_MEANS, "an executable that stays open for writing"


def _read_outputs(directory: Path, image: KernelImage, order: int) -> dict[str, np.ndarray]:
    outputs = {}
    for index, buffer in enumerate(image.buffers):
        path = directory / f"output_{index}_{order}.bin"
        if buffer.output and path.exists():
            values = np.fromfile(path, dtype=numpy_dtype(buffer.dtype))
            outputs[buffer.name] = values.reshape(buffer.shape)
    return outputs


def _findings(
    records: list[dict[str, Any]], executable: Path, translation: Translation, image: KernelImage
) -> tuple[Finding, ...]:
    records = [record for record in records if record["kind"] not in _NO_FINDINGS]
    sites = [record[key] for record in records for key in ("first", "second")]
    statements = find_statements(executable, sites, translation.symbols, image.cuda)
    found: dict[tuple[object, ...], Finding] = {}
    for record in records:
        first, second = (statements.get(record[key], "") for key in ("first", "second"))
        kind = record["kind"]
        if kind == "barrier-statement":
            if first == second:
                continue
            kind = "barrier-divergence"
        buffer, index = _place(record, image)
        unit = "element" if record["argument"] >= 0 else "byte"
        actor = (record["cta"], record["thread"])
        finding = Finding(kind, buffer, index, unit, first, second, *actor, record["detail"])
        found.setdefault((kind, buffer, frozenset((first, second))), finding)
    return tuple(found.values())


def _place(record: dict[str, Any], image: KernelImage) -> tuple[str, int]:
    offset = record["offset"]
    if record["argument"] >= 0:
        buffer = image.memory[record["argument"]]
        return buffer.name, offset // numpy_dtype(buffer.dtype).itemsize
    if record["shared"]:
        return record["shared"], offset
    return ("shared memory", offset) if record["in_shared"] else ("", -1)
