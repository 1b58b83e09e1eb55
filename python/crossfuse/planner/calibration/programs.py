"""The micro-benchmarks, and what their output is called in a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossfuse import schema
from crossfuse.errors import EnvironmentRefused, RefusedError, refuse
from crossfuse.planner.calibration.products import TYPES, products
from crossfuse.planner.calibration.record import VERSION, Measured, read
from crossfuse.schema import Damaged, typed

SOURCES = Path(__file__).parent / "cuda"
"""Directory of the CUDA programs."""

#: CTAs of the cluster whose DSM latency counts.
_DSM_CLUSTER = 4


@dataclass(frozen=True)
class Program:
    """One program: a file of `SOURCES`, and headers that are written beside it.

    Attributes
    ----------
    name : str
        Its name in messages, and of the executable.
    source : str
        File in `SOURCES`.
    headers : Mapping[str, str]
        Text by file name.
    """

    name: str
    source: str
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
    """What every line says."""

    name: str
    value: float
    spread: float


def parse(text: str, program: str) -> list[dict[str, Any]]:
    """Read what a program printed.

    Parameters
    ----------
    text : str
        A JSON object in each line, see ``cuda/harness.h``.
    program : str
        Its name, for refusals.

    Returns
    -------
    list[dict[str, Any]]
        The lines.

    Raises
    ------
    EnvironmentRefused
        If a line is no JSON object with a name, a value and a spread, or there is none.
    """
    lines: list[dict[str, Any]] = []
    for line in filter(str.strip, text.splitlines()):
        try:
            found = typed(Mapping[str, str | float], schema.parse(line))
            typed(_Line, {each: found.get(each) for each in ("name", "value", "spread")})
        except Damaged:
            raise _refuse(program, repr(line[:200])) from None
        lines.append(dict(found))
    if not lines:
        raise _refuse(program, "no lines")
    return lines


def assemble(
    device: str, lines: Iterable[Mapping[str, Any]], machine: Mapping[str, Any]
) -> Measured:
    """Make the record of a device from what all programs printed.

    Parameters
    ----------
    device : str
        Target name.
    lines : Iterable[Mapping[str, Any]]
        From `parse`.
    machine : Mapping[str, Any]
        Where they were measured.

    Returns
    -------
    Measured
        The record.

    Raises
    ------
    EnvironmentRefused
        If a number is missing or absurd, see `crossfuse.planner.calibration.record.read`.
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
    """Field of a record that a line belongs to, and its number or row there."""
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


def _refuse(program: str, found: str) -> RefusedError:
    return refuse(
        EnvironmentRefused,
        "calibration-output",
        f"program {program}",
        found=found,
        limit='lines of JSON with "name", "value" and "spread"',
        instead="run the program by itself and look at its output",
    )
