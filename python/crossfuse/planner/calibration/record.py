"""The measured numbers of one device, as they are stored in ``planner/devices``."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from math import log
from pathlib import Path
from typing import Annotated, Any

from crossfuse.calls import checked
from crossfuse.errors import EnvironmentRefused, RefusedError, refuse
from crossfuse.files import read_text
from crossfuse.hardware import DEVICES, Device, device, record_path
from crossfuse.schema import Damaged, Extent, FileName, parse, shown, typed

VERSION = 1
"""Version of the schema; records of another one are stale."""

DIRECTORY = Path(__file__).parent.parent / "devices"
"""Where the records that come with the package are."""

_AGAIN = "measure the device again (crossfuse calibrate), or remove the file"
# Least and largest value that a Hopper GPU can have, several times what is known on either side.
# Rates in bytes or operations a microsecond, latencies in microseconds.
_LIMITS = {
    "hbm_read": (5e5, 1e7),
    "hbm_write": (5e5, 1e7),
    "hbm_ingest_all": (5e5, 1e7),
    "l2_read": (1e6, 5e7),
    "l2_write": (5e5, 5e7),
    "sm_ingest": (1e4, 1e6),
    "sm_ingest_all": (1e6, 5e7),
    "multicast_ingest": (5e3, 1e6),
    "multicast_ingest_one": (5e3, 1e6),
    "dsm_push": (2e3, 5e5),
    "dsm_push_bulk": (2e3, 5e5),
    "tensor": (1e4, 5e7),
    "hbm": (0.1, 5.0),
    "l2": (0.03, 2.0),
    "dsm": (0.02, 1.0),
    "cluster_barrier": (0.002, 5.0),
    "flag": (0.1, 20.0),
    "launch": (0.2, 20.0),
    "early_launch": (0.1, 20.0),
    "resident": (1, 132),
}


@dataclass(frozen=True)
class Measured:
    """What one GPU model can do. Rates of "one SM" are with all SMs at work, if not said.

    Attributes
    ----------
    name : str
        Target name, see `crossfuse.hardware.device`.
    provisional : bool
        Whether numbers are published or derived instead of measured on this device.
    hbm_read, hbm_write, l2_read, l2_write : float
        Bytes a microsecond over all SMs, by ordinary accesses.
    sm_ingest : float
        Bytes a microsecond that one SM takes in by TMA from L2, the others idle.
    sm_ingest_all, hbm_ingest_all : float
        The same of all SMs together, from L2 and from HBM.
    multicast_ingest, multicast_ingest_one : tuple[tuple[int, float], ...]
        Cluster size, and bytes a microsecond that arrive at one SM when each CTA loads its share
        for all; clusters on all SMs, and one cluster alone.
    dsm_push, dsm_push_bulk : tuple[tuple[int, float], ...]
        Cluster size, and bytes a microsecond that one SM sends to peers by st.async, and by bulk
        copies.
    tensor : tuple[tuple[int, int, str, float], ...]
        Rows and columns of a CTA's tile, element type, floating-point operations a microsecond of
        one SM, operands in shared memory.
    hbm, l2, dsm : float
        Microseconds of a load that the next one waits for; DSM in a cluster of 4.
    cluster_barrier : tuple[tuple[int, float], ...]
        Cluster size, and microseconds of arrive.release and wait.acquire.
    flag : float
        Microseconds from a store and release on one SM to acquire and load on another, through L2.
    launch, early_launch : float
        Microseconds from one empty kernel to the next in a CUDA graph, and with programmatic
        dependent launch.
    resident : tuple[tuple[int, int], ...]
        Cluster size, and clusters that run at once with all shared memory of an SM for each CTA.
    spread : Mapping[str, float]
        By field: (largest - smallest) / median of the repeats, the worst of its entries.
    machine : Mapping[str, Any]
        Where it comes from: device name, clocks, driver, CUDA version, date, commit; of a
        provisional record the sources.
    fitted : Mapping[str, Any]
        Constants that no micro-benchmark gives, fitted to measured kernels by the cost model.
    version : int
        Of the schema.
    """

    name: Annotated[str, FileName]
    provisional: bool
    hbm_read: float
    hbm_write: float
    l2_read: float
    l2_write: float
    sm_ingest: float
    sm_ingest_all: float
    hbm_ingest_all: float
    multicast_ingest: tuple[tuple[Extent, float], ...]
    multicast_ingest_one: tuple[tuple[Extent, float], ...]
    dsm_push: tuple[tuple[Extent, float], ...]
    dsm_push_bulk: tuple[tuple[Extent, float], ...]
    tensor: tuple[tuple[Extent, Extent, str, float], ...]
    hbm: float
    l2: float
    dsm: float
    cluster_barrier: tuple[tuple[Extent, float], ...]
    flag: float
    launch: float
    early_launch: float
    resident: tuple[tuple[Extent, int], ...]
    spread: Mapping[str, float] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    fitted: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> dict[str, Any]:
        """As a value that `json` can write."""
        return asdict(self)

    def text(self) -> str:
        """As the JSON text of a file, with a row of a table on each line."""
        parts = (f"  {json.dumps(key)}: {_lines(value)}" for key, value in self.to_json().items())
        return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(value: object) -> str:
    if not isinstance(value, tuple):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"


def read(value: object, where: str = "record") -> Measured:
    """Read and check what `Measured.to_json` and JSON made of a record.

    Parameters
    ----------
    value : object
        Fields by name.
    where : str
        File or name that refusals show.

    Returns
    -------
    Measured
        The record.

    Raises
    ------
    EnvironmentRefused
        If it is of another version of the schema, a field is missing or unknown, or a value is
        not one that a Hopper GPU can have.
    """
    if isinstance(value, Mapping) and value.get("version") != VERSION:
        raise _refuse(
            "stale", where, f"version {shown(value.get('version'))}", f"version {VERSION}"
        )
    try:
        found = typed(Measured, value)
    except Damaged as error:
        raise _refuse("corrupt", where, error.found, error.limit) from None
    return replace(found, **{name: _checked(name, getattr(found, name), where) for name in _LIMITS})


@checked
def load(path: Path) -> Measured:
    """Read a record from a file.

    Parameters
    ----------
    path : pathlib.Path
        JSON file.

    Returns
    -------
    Measured
        The record.

    Raises
    ------
    EnvironmentRefused
        If the file cannot be read, is no JSON, or `read` refuses what it says.

    Examples
    --------
    >>> import json
    >>> from pathlib import Path
    >>> path = Path("h100.json")  # of crossfuse calibrate
    >>> load(path).name  # doctest: +SKIP
    'nvidia-h100'
    """
    try:
        value = parse(read_text(path))
    except Damaged as error:
        raise _refuse("corrupt", str(path), error.found, error.limit) from None
    return read(value, str(path))


@lru_cache(maxsize=8)
def shipped(name: str) -> Measured:
    """Load the record of a device that comes with the package.

    Parameters
    ----------
    name : str
        One of `crossfuse.hardware.DEVICES`.

    Returns
    -------
    Measured
        Its record; `provisional` says whether it was measured elsewhere.
    """
    return load(DIRECTORY / f"{name}.json")


def _checked(name: str, value: Any, where: str) -> Any:
    """A number, or the rows of a table in order, within the limits of a field."""
    if not isinstance(value, tuple):
        return _number(name, value, where)
    if not value:
        raise _refuse("corrupt", f"{name} of {where}", "no rows", "a list of rows")
    for row in value:
        _number(name, row[-1], where)
    rows = sorted(value)
    if len({row[:-1] for row in rows}) != len(rows):
        raise _refuse("corrupt", f"{name} of {where}", "a key twice", "each key once")
    return tuple(rows)


def _number(name: str, value: float, where: str) -> float:
    least, most = _LIMITS[name]
    if not least <= value <= most:
        raise _refuse("absurd", f"{name} of {where}", value, f"{least:g} to {most:g}")
    return value


def _refuse(fault: str, where: str, found: object, limit: str) -> RefusedError:
    return refuse(
        EnvironmentRefused,
        f"calibration-{fault}",
        where,
        found=found,
        limit=limit,
        instead=_AGAIN,
    )


# The record of a device: its user's, the packaged one, or that of the nearest one, scaled.


def measured(target: str | Device | None = None) -> Measured:
    """What is known of a device: its record.

    Parameters
    ----------
    target : str | Device | None
        See `crossfuse.hardware.device`.

    Returns
    -------
    Measured
        The record that its user made (``crossfuse calibrate``), else the packaged one, else that of
        the nearest packaged device, scaled, with a warning; `provisional` says so.

    Raises
    ------
    EnvironmentRefused
        If the device is unknown, or the record is not sound.
    """
    spec = device(target)
    if spec.record:
        return _of_user(spec.name, spec.record)
    return shipped(spec.name) if spec.name in DEVICES else scaled(spec)


@lru_cache(maxsize=8)
def _of_user(name: str, _digest: str) -> Measured:
    """The record of a user. What no microbenchmark gives is that of the nearest packaged one."""
    found = load(record_path(name))
    packaged = shipped(name if name in DEVICES else nearest(device(name)).name)
    return replace(found, fitted={**packaged.fitted, **found.fitted})


@lru_cache(maxsize=8)
def scaled(target: Device) -> Measured:
    """Derive a record, and warn once that it is none.

    Rates of memory go with the width of its bus and its clock; those of an SM with the clock of the
    SMs, and those of all SMs with their number too. Latencies stay, and so does what was fitted.

    Parameters
    ----------
    target : Device
        Of a name without a record.

    Returns
    -------
    Measured
        A provisional record.

    Warns
    -----
    UserWarning
        With what it is scaled from, and how to measure.
    """
    base = nearest(target)
    record = shipped(base.name)
    memory, clock = _memory(target) / _memory(base), target.clock_mhz / base.clock_mhz
    every = clock * target.sms / base.sms
    sizes = (size for size, _ in record.resident)
    found = replace(
        record,
        name=target.name,
        provisional=True,
        hbm_read=record.hbm_read * memory,
        hbm_write=record.hbm_write * memory,
        hbm_ingest_all=record.hbm_ingest_all * memory,
        l2_read=record.l2_read * every,
        l2_write=record.l2_write * every,
        sm_ingest=record.sm_ingest * clock,
        sm_ingest_all=record.sm_ingest_all * every,
        multicast_ingest=_times(record.multicast_ingest, clock),
        multicast_ingest_one=_times(record.multicast_ingest_one, clock),
        dsm_push=_times(record.dsm_push, clock),
        dsm_push_bulk=_times(record.dsm_push_bulk, clock),
        tensor=tuple((*key, rate * clock) for *key, rate in record.tensor),  # type: ignore[misc]
        resident=tuple((size, target.resident_clusters(size)) for size in sizes),
        spread={},
        machine={"sources": [f"the record of {base.name}, scaled"]},
    )
    warnings.warn(
        f"crossfuse has no measurements of {target.name}: it plans by those of {base.name}, with "
        f"{memory:.2f} times the rate of memory, {clock:.2f} times the clock and {target.sms} for "
        f"{base.sms} SMs. Kernels are right, but may not be the fastest; `crossfuse calibrate` "
        "measures this GPU and keeps its record.",
        stacklevel=2,
    )
    return found


def nearest(target: Device) -> Device:
    """The measured device whose memory is the most alike."""
    return min(DEVICES.values(), key=lambda each: abs(log(_memory(target) / _memory(each))))


def _memory(target: Device) -> int:
    """Bits of its memory's bus times its clock: the rate, but for what all have in common."""
    return target.memory_bits * target.memory_mhz


def _times(table: tuple[tuple[int, float], ...], factor: float) -> tuple[tuple[int, float], ...]:
    return tuple((size, rate * factor) for size, rate in table)
