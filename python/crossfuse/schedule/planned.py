"""Schedules plans by the rules of their families, and reads databases of tuning records.

MetaSchedule's own constructor parses lines in threads: a broken one ends in an error without file
or line, and a blank one ends the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import read_layers
from crossfuse.calls import checked
from crossfuse.errors import ArtefactRefused, CascadeRefused, Rule, ScheduleRefused, refuse
from crossfuse.files import read_text
from crossfuse.hardware import Device
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.registry import CASCADE_FAMILIES, FAMILIES, families
from crossfuse.planner.kernels.shape import Shape, shape_of, shape_of_blocks
from crossfuse.planner.plan import Plan, aligned_function, plans_of_function
from crossfuse.schedule.primitive import reason
from crossfuse.schema import Damaged, parse, read

if TYPE_CHECKING:
    from crossfuse.cascade.spec import Derivation, Site

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


# Schedules plans of chains and of cascades by the rules of their families, with their tiles.


_plan_refused = Rule(ScheduleRefused, "plan")

#: Extents that a function must have in common with the planned chain.
_EXTENTS = ("m", "n", "k", "l", "products", "chain")


@checked
def schedule_workload(workload: Any, plan: Plan, *, constant_weights: bool = False) -> Any:
    """Schedule a workload as a plan says.

    Parameters
    ----------
    workload : str | WorkloadSpec | LayersSpec | tvm.tirx.PrimFunc
        A packaged id or the text of a spec, a spec, or a canonical function.
    plan : Plan
        From `crossfuse.plan`.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        See `schedule_planned`.

    Examples
    --------
    >>> import crossfuse
    >>> sch = crossfuse.schedule("G1", crossfuse.plan("G1"))
    >>> len(sch.trace.insts) > 10
    True
    """
    from crossfuse import _tvm as ir
    from crossfuse.workload import prim_func
    from crossfuse.workload.suites import resolve_chain

    if not isinstance(workload, ir.PrimFunc):
        spec = resolve_chain(workload)
        padded = aligned_function(spec)
        workload = padded if padded is not None and is_of(plan, padded) else prim_func(spec)
    return schedule_planned(workload, plan, constant_weights=constant_weights)


def is_of(plan: Plan, func: Any) -> bool:
    """Whether a plan is for the extents of a canonical function."""
    return not _differ(func, plan)[0]


def _differ(func: Any, plan: Plan) -> tuple[list[str], Shape, Shape]:
    """Extents in which function and plan differ, and the shapes of both."""
    from crossfuse import _tvm as ir

    found, wanted = (
        shape_of_blocks(read_layers(ir.Schedule(func), makes_rows=True)),
        shape_of(plan.chain),
    )
    return [e for e in _EXTENTS if getattr(found, e) != getattr(wanted, e)], found, wanted


def _check_chain(func: Any, plan: Plan) -> None:
    """Refuse a plan for other extents: its tiles may fit, but were not chosen for these."""
    differ, found, wanted = _differ(func, plan)
    if differ:
        raise _plan_refused(
            f"family '{plan.family}'",
            found=", ".join(f"{each} = {getattr(found, each)}" for each in differ),
            limit=", ".join(f"{each} = {getattr(wanted, each)}" for each in differ)
            + ", which the plan is of",
            instead="plan this workload",
        )


def rank_function(
    func: Any, target: Device, *, keep: int = 1, fused: bool = False, pipelined: bool = False
) -> list[Plan]:
    """Plan a canonical function for a device, the fastest plan first; one at least is our kernel.

    At most `keep` plans are of a family; `fused` leaves out the plan not to fuse, and `pipelined`
    kernels that are none of the Hopper pipeline. Refused is a function that is no chain, or for
    which no kernel of ours fits. See `crossfuse.planner.plan.ranked`.
    """
    options = {"keep": keep, "pipelined": pipelined}
    found = plans_of_function(func, target, fused=fused, **options)
    if all(each.family == EAGER for each in found):
        # Says which rule leaves no tiles of each family.
        found = plans_of_function(func, target, fused=True, **options)
    return found


def schedule_planned(func: Any, plan: Plan, *, constant_weights: bool = False) -> Any:
    """Schedule the canonical function that a plan is for.

    A plan not to fuse, or one for another function, is refused. No kernel that may still be running
    writes weights that are `constant_weights`.
    """
    _check_chain(func, plan)
    if plan.family in FAMILIES:
        family = FAMILIES[plan.family]
        return family.schedule(func, plan.tiles, plan.device, constant_weights=constant_weights)
    raise _plan_refused(
        f"family '{plan.family}'",
        found=f"a plan of {plan.microseconds:.1f} us that leaves the chain to a library",
        limit="a plan of a kernel of ours",
        instead=f"call the library, plan with only={_families(plan)}, or compile without a plan, "
        "which fuses",
    )


def _families(plan: Plan) -> tuple[str, ...]:
    """Families of kernels that a plan's chain may have."""
    of = families(shape_of(plan.chain, k_major=plan.k_major))
    return tuple(each.name for each in of)


# Cascades.


def only_site(func: Any) -> Site:
    """The one cascade of a function; several are refused.

    Of rows in front of a chain it is that of the rows, of attention and a product that of
    attention.
    """
    from crossfuse.cascade.rewrite.rows_first import sites_of

    sites = sites_of(func)
    if len(sites) == 1:
        return sites[0]
    raise refuse(
        CascadeRefused,
        "compile",
        "function",
        found=f"{len(sites)} cascades over different axes",
        limit="one, which becomes one kernel",
        instead="split the function between them, or run crossfuse.relax.FuseCascades on its model",
    )


def schedule_cascade(
    site: Site,
    derivation: Derivation,
    family: str,
    tiles: Mapping[str, Any],
    *,
    constant_weights: bool = False,
) -> Any:
    """Write a cascade as a stream, and schedule it by one of `CASCADE_FAMILIES`.

    Tiles are fields of the family's `kind`, with the class's defaults; `constant_weights` is of
    families ``rows`` and ``rows_chain``: no kernel that may still be running writes the weights.
    The trace replays on the stream, not on the function. Refused are other families and fields, and
    a cascade that has no such form.
    """
    if family not in CASCADE_FAMILIES:
        raise _plan_refused(
            f"family '{family}'",
            found="a plan that leaves the cascade to separate kernels"
            if family == EAGER
            else "a family of chains of products",
            limit=", ".join(CASCADE_FAMILIES),
            instead=f"plan with only={tuple(CASCADE_FAMILIES)}",
        )
    of = CASCADE_FAMILIES[family]
    return of.schedule(site, derivation, of.read(tiles), constant=constant_weights)


def schedule_cascade_of(
    func: Any, family: str, tiles: Mapping[str, Any], *, constant_weights: bool = False
) -> Any:
    """Schedule the only cascade of a function; see `schedule_cascade`."""
    from crossfuse.cascade.algebra import derive

    site = only_site(func)
    return schedule_cascade(
        site, derive(site.cascade), family, tiles, constant_weights=constant_weights
    )
