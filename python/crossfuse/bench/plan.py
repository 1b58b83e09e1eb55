"""Turns the words of a command line into jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from crossfuse.bench.cascades import cascade_floor, rows_of
from crossfuse.bench.floor import floor
from crossfuse.bench.job import L2, PROTOCOLS, VARIANTS, Planned
from crossfuse.errors import Rule, WorkloadRefused
from crossfuse.measure.job import Job
from crossfuse.measure.timing import CALLS, REPEATS
from crossfuse.models.spec import ModelSpec, names_one
from crossfuse.workload import cascades
from crossfuse.workload.cascade_spec import CascadeSpec
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
