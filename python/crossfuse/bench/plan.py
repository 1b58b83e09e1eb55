"""Turns the words of a command line into jobs, and runs them."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from crossfuse.bench.cascades import cascade_floor, rows_of
from crossfuse.bench.job import L2, PROTOCOLS, VARIANTS, Counters, Planned, Row, floor
from crossfuse.bench.variants import compile_kernel, kernels
from crossfuse.errors import Rule, WorkloadRefused
from crossfuse.measure.job import Job, Request, Timing
from crossfuse.measure.timer import WORKER, Measurer
from crossfuse.measure.timing import CALLS, REPEATS
from crossfuse.models.spec import ModelSpec, names_one
from crossfuse.workload import cascades
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.cascades import resolve_any
from crossfuse.workload.dtypes import closest
from crossfuse.workload.spec import KINDS, WorkloadSpec
from crossfuse.workload.suites import ids, resolve, take_apart

_refused = Rule(WorkloadRefused, "bench")

#: Names of suites.
SUITES = ("gemm_chain", "gated_ffn", "conv_chain", "cascade")
#: Other names of variants.
_ALIASES = {"compile-max": "autotune", "ours-two-kernels": "ours-global"}


@dataclass(frozen=True)
class Setting:
    """How every workload is measured: the product of variants, cache states and protocols."""

    #: Keys of `VARIANTS`, or empty for what there is of each workload; the next two are keys of
    #: `L2` and `PROTOCOLS`.
    variants: tuple[str, ...]
    l2: tuple[str, ...] = ("cold",)
    protocols: tuple[str, ...] = ("graph",)
    #: See `crossfuse.measure.job.Job`, also for calls.
    repeats: int = REPEATS
    calls: int = CALLS


def setting(variants: str | None, l2: str, protocols: str, repeats: int, calls: int) -> Setting:
    """Read the options that say how to measure; names in a text are separated by commas.

    No `variants` are those that say most of each workload, see `usual`. An unknown name is refused,
    with the closest known one.
    """
    named = _names("--variants", variants, (*VARIANTS, *_ALIASES)) if variants is not None else ()
    return Setting(
        tuple(dict.fromkeys(_ALIASES.get(each, each) for each in named)),
        _names("--l2", l2, L2),
        _names("--protocol", protocols, PROTOCOLS),
        repeats,
        calls,
    )


def plan(workloads: Sequence[str], rows: str, how: Setting) -> tuple[Planned, ...]:
    """List the jobs of a run without repetitions, those of one workload next to each other.

    Workloads are ids (``S3``, ``S3:dtype=float16``), names of suites (``gated_ffn``) and texts of
    specs. `rows` are values for M separated by commas, for models their tokens; empty takes those
    of the workloads. Rows of cascades are refused, as is what cannot be read.
    """
    found: dict[Job, Planned] = {}
    for label, spec in select(workloads, _rows(rows)):
        for l2 in how.l2:
            for protocol in how.protocols:
                for variant in how.variants or usual(spec):
                    job = Job(str(spec), variant, l2, protocol, how.repeats, how.calls)
                    for each in _planned(label, spec, job):
                        found.setdefault(each.job, each)
    return tuple(found.values())


def usual(spec: WorkloadSpec | CascadeSpec | ModelSpec) -> tuple[str, ...]:
    """Ours and its baselines; of gated networks also that with gate and up apart."""
    apart = ("eager-apart",) if isinstance(spec, WorkloadSpec) and spec.gated else ()
    return ("ours", "eager", *apart, "compile", "autotune")


def _planned(label: str, spec: WorkloadSpec | CascadeSpec | ModelSpec, job: Job) -> list[Planned]:
    if isinstance(spec, ModelSpec):
        from crossfuse.bench.models import planned

        return planned(spec, job)
    least = cascade_floor(spec) if isinstance(spec, CascadeSpec) else floor(spec)
    count = rows_of(spec) if isinstance(spec, CascadeSpec) else spec.M
    return [Planned(label, count, least.microseconds, job, least.bytes)]


def select(
    workloads: Iterable[str], rows: Sequence[int]
) -> list[tuple[str, WorkloadSpec | CascadeSpec | ModelSpec]]:
    """Resolve workloads and spread them over rows, see `plan`; labels leave out the rows."""
    found: list[tuple[str, WorkloadSpec | CascadeSpec | ModelSpec]] = []
    for text in workloads:
        for name in ids(text.strip()) if text.strip() in SUITES else (text,):
            if names_one(name):
                from crossfuse.bench.models import spread

                found += [(name, each) for each in spread(name, rows)]
                continue
            if cascades.names_one(name):
                found.append((name.strip(), _cascade(name, rows)))
                continue
            spec = resolve(name)
            specs = [replace(spec, M=each) for each in rows] or [spec]
            found += [(_label(name), each) for each in specs]
    return found


def _cascade(text: str, rows: Sequence[int]) -> CascadeSpec:
    if rows:
        raise _refused(
            "--m",
            found=f"{','.join(map(str, rows))} for {text.strip()}",
            limit="chains of products, whose rows M are",
            instead="leave --m out, and write the rows of a cascade into it: R7:rows=16",
        )
    return cascades.resolve(text)


def _label(text: str) -> str:
    """The workload as written, without its rows and default type."""
    head, options = take_apart(text)
    plain = {"M": None, "dtype": "bfloat16"} if head in KINDS else {"M": None}
    kept = [
        f"{key}={value}"
        for key, value in options.items()
        if key not in plain or plain[key] not in (None, value)
    ]
    return ":".join([head, ",".join(kept)] if kept else [head])


def _rows(text: str) -> tuple[int, ...]:
    words = _words(text)
    if all(word.isascii() and word.isdecimal() and len(word) < 20 for word in words):
        return tuple(map(int, words))
    raise _refused(
        "--m",
        found=repr(text),
        limit="positive integers separated by commas",
        instead="write --m 1,16,64,128, say",
    )


def _names(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    words = _words(text)
    for word in words or ("",):
        if word not in known:
            raise _refused(
                option,
                found=repr(word),
                limit="names separated by commas, of " + ", ".join(known),
                instead=closest(word, known, "choose some of these"),
            )
    return tuple(dict.fromkeys(words))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


# Measuring of jobs one after another, each in a worker, while the next ones prepare.


#: Workers that import, compile and work out references while another one measures.
_PREPARING = 2


def run(
    planned: Sequence[Planned],
    timeout: float,
    *,
    report: Callable[[Row], None] = lambda row: None,
    command: Sequence[str] = WORKER,
    count: Callable[[Job, float], Counters] | None = None,
) -> tuple[Row, ...]:
    """Measure everything, in order; a job that breaks becomes a row that says so.

    `timeout` is in seconds for each job, from when it may measure. `report` gets every row as soon
    as it is there. `count` reads the memory traffic of a job that has a time, such as
    `crossfuse.bench.counters.count`. `command` replaces `WORKER`.
    """
    rows = []
    counted: dict[Job, Counters] = {}
    with tempfile.TemporaryDirectory(prefix="crossfuse-bench-") as folder:
        # The folder keeps float64 references between the variants of a workload.
        jobs = [each.job for each in planned]
        for each, timing in zip(planned, measured(jobs, timeout, command, folder), strict=True):
            row = Row(each, timing)
            if count is not None and row.timing.microseconds is not None:
                # The protocol changes how kernels are launched, and not what they read.
                once = replace(each.job, protocol="stream", repeats=1, calls=1)
                counted[once] = counted.get(once) or count(once, timeout)
                row = replace(row, counters=counted[once])
            rows.append(row)
            report(row)
    return tuple(rows)


def measured(
    jobs: Sequence[Job], timeout: float, command: Sequence[str] = WORKER, folder: str = ""
) -> Iterator[Timing]:
    """Yield the timings of jobs, one after another, each measured in a process of its own.

    The next ones prepare in the meantime, without the GPU. With protocols that time launches none
    does: it would compete for the CPU cores. `timeout` is in seconds for each job, from when it may
    measure: for the rest of the preparation, and as many for the measurement.
    """
    quiet = any(each.protocol == "stream" for each in jobs)
    measurers: deque[tuple[Measurer, Request]] = deque()
    waiting = iter(jobs)
    try:
        for _ in jobs:
            wanted = 1 if quiet else 1 + _PREPARING
            while len(measurers) < wanted and (job := next(waiting, None)) is not None:
                measurers.append((Measurer(command, timeout), Request(job, folder=folder)))
                measurers[-1][0].prepare(measurers[-1][1])
            measurer, request = measurers[0]
            timing, _attempts = measurer.measure(request, timeout)
            measurer.close()
            measurers.popleft()
            yield timing
    finally:
        for measurer, _request in measurers:
            measurer.close()


_Kernel = tuple[WorkloadSpec | CascadeSpec, str | None]


def build_ahead(planned: Sequence[Planned], workers: int, target: str, timeout: float) -> int:
    """Fill the kernel cache in parallel, so that timed jobs find their cubins; returns how many.

    Jobs run one after another, since they are timed, and nvcc takes most of the time of one of
    ours. A kernel that does not compile, or is not done after `timeout` seconds, is left to its
    job, which says why; so are all that a killed process leaves. No workers: nothing is compiled.
    """
    wanted = distinct(each.job for each in planned if not names_one(each.job.spec))
    return in_processes(_build, [(*each, target) for each in wanted], workers, timeout)


def in_processes(
    work: Callable[..., bool], arguments: Sequence[tuple[Any, ...]], workers: int, timeout: float
) -> int:
    """Call a function several times in parallel, and count how often it says that it was done.

    What a killed process leaves, or is not begun after `timeout` seconds, does not count. A single
    call is left out, and all are without workers.
    """
    if not workers or len(arguments) < 2:
        return 0
    # A process of its own for each: a fork would share this one's threads and its GPU.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = [pool.submit(work, *each) for each in arguments]
        done, _ = wait(futures, timeout)
        pool.shutdown(wait=True, cancel_futures=True)
    return sum(each.result() for each in done if each.exception() is None)


def distinct(jobs: Iterable[Job]) -> tuple[_Kernel, ...]:
    """The kernels of all jobs without repetitions, each with the placement of its intermediate."""
    return tuple(
        dict.fromkeys(
            kernel for job in jobs for kernel in kernels(job.variant, resolve_any(job.spec))
        )
    )


def _build(spec: WorkloadSpec | CascadeSpec, placement: str | None, target: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="crossfuse-ahead-") as folder:
        try:
            compile_kernel(spec, placement, target, folder)
        except Exception:  # its job reports it
            return False
    return True
