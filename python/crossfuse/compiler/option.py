"""One option to schedule a function, and why it was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.compiler.source import Source
from crossfuse.errors import ArtefactRefused, RefusedError, refuse
from crossfuse.hardware import Device, tvm_target
from crossfuse.planner.families.registry import CASCADE_FAMILIES
from crossfuse.schedule.records import read_note
from crossfuse.schema import Damaged

if TYPE_CHECKING:
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan


@dataclass(frozen=True)
class Option:
    """A way to schedule a function, with the plan that it follows."""

    #: Makes the schedule, or refuses.
    make: Callable[[], Any]
    #: None where a rule chooses the tiles, or the caller scheduled the function.
    plan: Plan | CascadePlan | None = None
    #: Plain values for the library's metadata: what was planned, or why nothing was.
    why: Mapping[str, Any] = field(default_factory=dict)


# The option that replays the fastest kernel of a tuning session.

#: Seconds from which on a record is one of a kernel that failed: MetaSchedule stores 1e10.
_FAILED = 1e6


def recorded_options(
    source: Source, work_dir: str | Path, target: Device, constant: bool = False
) -> list[Option]:
    """The fastest kernel of a source in the database of a tuning session, as the only option.

    A trace of a chain is replayed on its function; a cascade is written as the stream that was
    measured, which its record names. `constant` says that no kernel which may still be running
    writes a cascade's weights; traces of chains say it themselves. A folder without a database, or
    without a valid time of this function, raises `ArtefactRefused`.
    """
    from tvm.s_tir.meta_schedule.tune_context import _normalize_mod

    from crossfuse.schedule.records import note, read_database

    if source.func is None:
        raise _refused(source, work_dir, "a schedule, which has no choices left")
    database = read_database(work_dir)
    module = _normalize_mod(source.func)
    record = database.query_tuning_record(module, tvm_target(target), "main")
    seconds = [] if record is None else [float(each) for each in record.run_secs]
    if not seconds or min(seconds) >= _FAILED:
        raise _refused(source, work_dir, "no kernel of it that was right")
    said = _said(source, work_dir, note(record.trace))
    why = {"recorded": {**said, "microseconds": min(seconds) * 1e6, "database": str(work_dir)}}
    if said.get("family") in CASCADE_FAMILIES:
        from crossfuse.schedule.cascades import schedule_cascade_of

        make = partial(
            schedule_cascade_of,
            source.func,
            said["family"],
            said["tiles"],
            constant_weights=constant,
        )
    else:
        make = partial(_replayed, source.func, record.trace)
    return [Option(make, why=why)]


def _said(source: Source, work_dir: str | Path, text: str | None) -> dict[str, Any]:
    """Contents of a trace's note; empty if it has none."""
    try:
        return {} if text is None else asdict(read_note(text))
    except Damaged as error:
        raise _refused(source, work_dir, f"a note that is none ({error})") from None


def _replayed(func: Any, trace: Any) -> Any:
    from crossfuse import _tvm as ir

    schedule = ir.Schedule(func)
    trace.apply_to_schedule(schedule, remove_postproc=False)
    return schedule


def _refused(source: Source, work_dir: str | Path, found: str) -> RefusedError:
    return refuse(
        ArtefactRefused,
        "database",
        str(work_dir),
        found=f"{found}: {source.summary}",
        limit="a record with a time, of this workload and target",
        instead="tune it there (crossfuse tune --work-dir), or leave the database out",
    )
