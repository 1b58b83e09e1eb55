"""Records as those of MetaSchedule's JSON database, which replays them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from crossfuse.errors import RefusedError
from crossfuse.hardware import device, tvm_target
from crossfuse.meta_schedule.records import Record
from crossfuse.meta_schedule.scheduled import schedule_candidate

#: What MetaSchedule takes for the time of a candidate that has none.
FAILED_SECONDS = 1e10


def open_database(work_dir: str | os.PathLike[str]) -> Any:
    """Open or make the database of a folder, as ``ms.tune_tir(work_dir=...)`` does.

    Parameters
    ----------
    work_dir : path
        The folder; made if need be.

    Returns
    -------
    tvm.s_tir.meta_schedule.database.JSONDatabase
        Its database.
    """
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    os.makedirs(work_dir, exist_ok=True)
    return JSONDatabase(work_dir=str(work_dir))


def commit(database: Any, records: Iterable[Record], target: str) -> int:
    """Store records, so that a search begins with them and `query_schedule` replays the best.

    Parameters
    ----------
    database : tvm.s_tir.meta_schedule.database.Database
        Where to.
    records : Iterable[Record]
        What was measured. Candidates that hang, die or are wrong are stored with
        `FAILED_SECONDS`, as MetaSchedule does, so that they are not measured again; what has no
        schedule (baselines, refused tiles) is left out.
    target : str
        Device that was measured.

    Returns
    -------
    int
        Records stored.
    """
    stored = 0
    for each in records:
        try:
            stored += _commit(database, each, target)
        except RefusedError:
            # It was refused when it was built, too.
            continue
    return stored


def _commit(database: Any, record: Record, target: str) -> bool:
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.meta_schedule.database import TuningRecord

    if record.candidate.family == "eager":
        return False
    spec = device(target)
    schedule = schedule_candidate(record.candidate, spec)
    module = workload_module(record.candidate.spec)
    workload = database.commit_workload(module)
    time = record.microseconds
    seconds = [FAILED_SECONDS if time is None else time * 1e-6]
    arguments = ArgInfo.from_prim_func(module["main"])
    database.commit_tuning_record(
        TuningRecord(schedule.trace, workload, seconds, tvm_target(spec), arguments)
    )
    return True


def workload_module(spec: str) -> Any:
    """The unscheduled module by which MetaSchedule knows a workload.

    Parameters
    ----------
    spec : str
        Text of the workload.

    Returns
    -------
    tvm.ir.IRModule
        Equal to that of ``ms.tune_tir(prim_func(parse(spec)), ...)``.
    """
    from tvm.s_tir.meta_schedule.tune_context import _normalize_mod

    from crossfuse.workload.build import prim_func
    from crossfuse.workload.spec_text import parse

    return _normalize_mod(prim_func(parse(spec)))
