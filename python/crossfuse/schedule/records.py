"""Opens databases of tuning records, with errors that name the file and the line.

MetaSchedule's own constructor parses lines in threads: a broken one ends in an error without file
or line, and a blank one ends the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import ArtefactRefused, Rule
from crossfuse.files import read_text
from crossfuse.schedule.primitive import reason
from crossfuse.schema import Damaged, parse, read

_refused = Rule(ArtefactRefused, "database")

WORKLOADS = "database_workload.json"
RECORDS = "database_tuning_record.json"


def read_database(work_dir: str | Path) -> Any:
    """Open the JSON database in the directory of a tuning session, with all its records.

    Files that do not exist yet are made, and commits are appended to them. The first line that is
    no record, or whose trace does not fit its workload, is refused by its number.
    """
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    directory = Path(work_dir)
    if not directory.is_dir():
        raise _refused(
            str(directory),
            found="no such directory",
            limit="the directory of a tuning session",
            instead="make the directory, or pass the work_dir that the session was given",
        )
    workloads = _lines(directory / WORKLOADS)
    records = _lines(directory / RECORDS)
    try:
        return JSONDatabase(work_dir=str(directory))
    except RuntimeError:
        _explain(directory, workloads, records)
        raise


def _lines(path: Path) -> list[list[Any]]:
    """The lines of a file, each a JSON pair; none if there is no file."""
    if not path.exists():
        return []
    try:
        lines = read_text(path).splitlines()
    except Damaged as error:
        raise _refuse(path, 1, str(error)) from None
    return [_pair(path, number, line) for number, line in enumerate(lines, 1)]


def _pair(path: Path, number: int, line: str) -> list[Any]:
    if not line.strip():
        raise _refuse(path, number, "a blank line")
    try:
        value = parse(line)
    except Damaged as error:
        raise _refuse(path, number, f"broken JSON ({error})") from None
    if not isinstance(value, list) or len(value) != 2:
        raise _refuse(path, number, "JSON that is no pair")
    return value


def _explain(directory: Path, workloads: list[list[Any]], records: list[list[Any]]) -> None:
    """Parse line by line after a failure, and refuse the first line that fails."""
    from tvm.s_tir.meta_schedule.database import TuningRecord, Workload

    known = []
    for number, pair in enumerate(workloads, 1):
        try:
            known.append(Workload.from_json(pair))
        except Exception as error:  # TVM raises what the broken part happens to raise
            raise _refuse(directory / WORKLOADS, number, f"no workload: {reason(error)}") from error
    for number, (index, record) in enumerate(records, 1):
        path = directory / RECORDS
        if not isinstance(index, int) or not 0 <= index < len(known):
            raise _refuse(path, number, f"workload {index} of {len(known)}")
        unknown = _unknown_instruction(record)
        if unknown:
            raise _refuse(path, number, f"unknown instruction '{unknown}'")
        try:
            TuningRecord.from_json(record, known[index])
        except Exception as error:
            why = _mismatch(record, known[index]) or reason(error)
            found = f"a record that does not fit workload {index}: {why}"
            raise _refuse(path, number, found) from error


def _unknown_instruction(record: Any) -> str:
    """Name of the first instruction that this TVM does not have; empty if it has all."""
    from tvm.s_tir.schedule import InstructionKind

    try:
        names = [str(instruction[0]) for instruction in record[0][0]]
    except (IndexError, KeyError, TypeError):
        return ""  # no trace at all; TVM says what it misses
    for name in names:
        try:
            InstructionKind.get(name)
        except Exception:  # TVM: a check of its registry
            return name
    return ""


def _mismatch(record: Any, workload: Any) -> str:
    """The error of applying a record's trace; TVM loads records without it. Empty if none."""
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    try:
        Trace.apply_json_to_schedule(record[0], Schedule(workload.mod))
    except Exception as error:
        return reason(error)
    return ""


def _refuse(path: Path, number: int, found: str) -> Exception:
    return _refused(
        f"{path}, line {number}",
        found=found,
        limit="a line that this version of TVM and Crossfuse wrote",
        instead="delete the line (of the workload table only the last one: records count its "
        "lines), or tune again in another directory",
    )


# Traces as JSON text: TVM's ``as_json`` leaves integer nodes that ``json`` cannot write.


def trace_json(trace: Any) -> str:
    """Render a trace as text for ``json.loads`` and then ``Trace.apply_json_to_schedule``."""
    return json.dumps(trace.as_json(), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, ir.tirx.IntImm):
        return bool(value.value) if str(value.ty.dtype) == "bool" else int(value.value)
    if isinstance(value, ir.tirx.FloatImm):
        return float(value.value)
    raise TypeError(f"{type(value).__name__} in a trace")


# Records in a trace which plan a schedule follows.
#
# The note is an annotation of the root block, in JSON. It is part of the trace, so that it outlives
# the database, and the lowering ignores it::
#
#     sch.annotate("root", "crossfuse.plan", '{"family": "dsm", "tiles": {"rows": 64, ...}}')

#: Key of the annotation.
NOTE = "crossfuse.plan"


def annotate_plan(sch: Any, family: str, tiles: Mapping[str, Any]) -> None:
    """Record which plan a schedule of one function follows; tiles are plain values."""
    text = json.dumps(asdict(Note(family, dict(tiles))))
    sch.annotate(sch.get_sblock("root"), NOTE, text)


@dataclass(frozen=True)
class Note:
    """The contents of a note; see `annotate_plan`."""

    family: str
    tiles: Mapping[str, Any]


def read_note(text: str) -> Note:
    """Read the note of a trace; any other text is `Damaged`."""
    return read(Note, text)


def note(trace: Any) -> str | None:
    """The note of a trace; None where there is none."""
    for each in reversed(trace.insts):
        if str(each.kind.name) == "Annotate" and str(each.attrs[0]) == NOTE:
            return str(each.inputs[1])
    return None
