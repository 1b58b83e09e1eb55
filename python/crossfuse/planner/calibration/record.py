"""The measured numbers of one device, as they are stored in ``planner/devices``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from crossfuse.calls import checked
from crossfuse.errors import EnvironmentRefused, RefusedError, refuse
from crossfuse.files import read_text
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
