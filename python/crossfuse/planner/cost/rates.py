"""Rates and latencies of a device for the cost model.

The record of a device has two parts: what microbenchmarks measure (``crossfuse calibrate``), and
what was fitted to the times of whole kernels (`scripts/fit_costs.py`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from crossfuse.calls import checked
from crossfuse.errors import EnvironmentRefused, PlanRefused, RefusedError, refuse
from crossfuse.files import read_text
from crossfuse.hardware import DEVICES, Device, device, record_path
from crossfuse.planner.cost.terms import Estimate, OwnTerm, Trees, trees_of
from crossfuse.planner.kernels.shape import Count, Shape, Share
from crossfuse.schema import Damaged, Extent, FileName, Positive, parse, shown, typed

if TYPE_CHECKING:
    from crossfuse.planner.cascade.shape import CascadeShape
    from crossfuse.planner.families.family import CascadeKernel
    from crossfuse.planner.kernels.kernel import TileKernel


# The measured numbers of one device, as they are stored in ``planner/devices``.

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
    """What one GPU model can do.

    Rates are bytes, or floating-point operations, per microsecond; times are microseconds. Rates of
    one SM are with all SMs at work, unless said otherwise. Tables have the cluster size first.
    """

    #: Target name, see `crossfuse.hardware.device`.
    name: Annotated[str, FileName]
    #: Whether numbers are published or derived instead of measured on this device.
    provisional: bool
    #: Memory and L2: over all SMs, by ordinary accesses.
    hbm_read: float
    hbm_write: float
    l2_read: float
    l2_write: float
    #: What one SM takes in by TMA from L2 while the others idle.
    sm_ingest: float
    #: The same of all SMs together, from L2 and from HBM.
    sm_ingest_all: float
    hbm_ingest_all: float
    #: What arrives at one SM when each CTA of a cluster loads its share for all: with clusters on
    #: all SMs, and with one cluster alone.
    multicast_ingest: tuple[tuple[Extent, float], ...]
    multicast_ingest_one: tuple[tuple[Extent, float], ...]
    #: What one SM sends to its peers, by st.async and by bulk copies.
    dsm_push: tuple[tuple[Extent, float], ...]
    dsm_push_bulk: tuple[tuple[Extent, float], ...]
    #: Rows and columns of a CTA's tile, element type, and operations of one SM with operands in
    #: shared memory.
    tensor: tuple[tuple[Extent, Extent, str, float], ...]
    #: Latencies of dependent loads; of DSM in a cluster of 4.
    hbm: float
    l2: float
    dsm: float
    #: From arrive.release to the end of wait.acquire.
    cluster_barrier: tuple[tuple[Extent, float], ...]
    #: From a store and release on one SM to acquire and load on another, through L2.
    flag: float
    #: From one empty kernel to the next in a CUDA graph, and with programmatic dependent launch.
    launch: float
    early_launch: float
    #: Clusters that run at once when each CTA takes all shared memory of an SM.
    resident: tuple[tuple[Extent, int], ...]
    #: By field: (largest - smallest) / median of the repeats, of the worst entry.
    spread: Mapping[str, float] = field(default_factory=dict)
    #: Provenance: device name, clocks, driver, CUDA version, date, commit; of a provisional record
    #: its sources.
    machine: Mapping[str, Any] = field(default_factory=dict)
    #: Constants that no micro-benchmark gives, fitted to measured kernels.
    fitted: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> dict[str, Any]:
        """Convert to a value that `json` can write."""
        return asdict(self)

    def text(self) -> str:
        """Format as the JSON text of a file, with each row of a table on a line of its own."""
        parts = (f"  {json.dumps(key)}: {_lines(value)}" for key, value in self.to_json().items())
        return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(value: object) -> str:
    if not isinstance(value, tuple):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"


def read(value: object, where: str = "record") -> Measured:
    """Read a record from the value that `Measured.to_json` gave, and check it.

    Refused are other versions of the schema, missing and unknown fields, and values that no Hopper
    GPU can have. `where` is the file or name in refusals.
    """
    if isinstance(value, Mapping) and value.get("version") != VERSION:
        raise refuse_record(
            "stale", where, f"version {shown(value.get('version'))}", f"version {VERSION}"
        )
    try:
        found = typed(Measured, value)
    except Damaged as error:
        raise refuse_record("corrupt", where, error.found, error.limit) from None
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
        raise refuse_record("corrupt", str(path), error.found, error.limit) from None
    return read(value, str(path))


@lru_cache(maxsize=8)
def shipped(name: str) -> Measured:
    """Load the record of one of `crossfuse.hardware.DEVICES` that comes with the package."""
    return load(DIRECTORY / f"{name}.json")


def _checked(name: str, value: Any, where: str) -> Any:
    """Check a number, or the rows of a table, against the limits of a field, and sort the rows."""
    if not isinstance(value, tuple):
        return _number(name, value, where)
    if not value:
        raise refuse_record("corrupt", f"{name} of {where}", "no rows", "a list of rows")
    for row in value:
        _number(name, row[-1], where)
    rows = sorted(value)
    if len({row[:-1] for row in rows}) != len(rows):
        raise refuse_record("corrupt", f"{name} of {where}", "a key twice", "each key once")
    return tuple(rows)


def _number(name: str, value: float, where: str) -> float:
    least, most = _LIMITS[name]
    if not least <= value <= most:
        raise refuse_record("absurd", f"{name} of {where}", value, f"{least:g} to {most:g}")
    return value


def refuse_record(fault: str, where: str, found: object, limit: str) -> RefusedError:
    """A refusal of a record, to raise."""
    return refuse(
        EnvironmentRefused,
        f"calibration-{fault}",
        where,
        found=found,
        limit=limit,
        instead=_AGAIN,
    )


def measured(target: str | Device | None = None) -> Measured:
    """Find the record of a device: its user's, the packaged one, or the nearest one scaled.

    A user's is made by ``crossfuse calibrate``. Where neither that nor a packaged one exists, the
    nearest packaged record is scaled, with a warning, and is `provisional`.
    """
    spec = device(target)
    if spec.record:
        return _of_user(spec.name, spec.record)
    return shipped(spec.name) if spec.name in DEVICES else scaled(spec)


@lru_cache(maxsize=8)
def _of_user(name: str, _digest: str) -> Measured:
    """Load a user's record; constants that were fitted come from the nearest packaged one.

    The digest is the cache key: a record that was measured anew is read again.
    """
    found = load(record_path(name))
    packaged = shipped(name if name in DEVICES else nearest(device(name)).name)
    return replace(found, fitted={**packaged.fitted, **found.fitted})


@lru_cache(maxsize=8)
def scaled(target: Device) -> Measured:
    """Derive a provisional record from the nearest measured device, and warn once about it.

    Rates of memory scale with bus width and memory clock, those of an SM with the SM clock, and
    those of all SMs with their number too. Latencies and fitted constants do not scale.
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
    """Find the packaged device with the most similar memory bandwidth."""
    return min(DEVICES.values(), key=lambda each: abs(log(_memory(target) / _memory(each))))


def _memory(target: Device) -> int:
    """Bus width in bits times memory clock: the bandwidth up to a factor that all devices share."""
    return target.memory_bits * target.memory_mhz


def _times(table: tuple[tuple[int, float], ...], factor: float) -> tuple[tuple[int, float], ...]:
    return tuple((size, rate * factor) for size, rate in table)


@dataclass(frozen=True)
class Fitted:
    """Constants that no microbenchmark gives: least squares over measured kernels.

    Times are microseconds; shares are of the measured rates.
    """

    #: From the end of the kernel before to the first tiles in shared memory, beside the latencies
    #: of the record, and what each doubling of the CTAs that begin adds.
    start: Positive = 0.5
    crowd: Positive = 0.2
    #: Shares of the measured rates that kernels reach.
    hbm: Positive = 1.0
    l2: Positive = 1.0
    ingest: Positive = 0.8
    tensor: Positive = 0.8
    #: Least time of a step of the ring.
    step: Positive = 0.05
    #: Time to issue a copy; a step has one for each box of a tile.
    copy: Positive = 0.03
    #: Share of the bytes that tiles one below the other read in common which come from memory
    #: again.
    again: Positive = 0.3
    #: Of the second product in a cluster, for an element of its reduction, where registers do not
    #: hold the sums.
    spill: Positive = 0.08
    #: Epilogue of a column of 64 rows beside its functions: of one product, and of gate and up.
    column: Positive = 0.01
    gated: Positive = 0.02
    #: From a stored tile of an intermediate to the first one that another SM has loaded, and the
    #: same from one kernel to the next.
    flag: Positive = 2.0
    relaunch: Positive = 3.0
    #: Share of the weights in flight to an SM that such a tile waits for.
    queue: Positive = 0.2
    #: By which share of a phase its last CTA is behind where others wait for it.
    imbalance: Positive = 0.1
    #: Partial sums through DSM beside their bytes, for each CTA that shares a sum.
    exchange: Positive = 0.1
    #: Share of the measured rate at which partial sums are sent and added.
    push: Positive = 0.6
    #: Slices of an intermediate through DSM, beside their bytes.
    gather: Positive = 1.0
    #: Partial sums through L2, beside their bytes, and for each part.
    sums: Positive = 2.5
    part: Positive = 0.1
    #: Time of a CTA's partial sums through L2, in times of taking in as many bytes.
    summed: Positive = 1.0
    #: From the last sum to the end of the kernel.
    store: Positive = 1.0
    #: Kernels of cuBLAS: shares of the rates of memory and of tensor cores that they reach, and
    #: time for each in a graph.
    eager: Positive = 0.8
    eager_tensor: Positive = 0.6
    eager_kernel: Positive = 2.5


#: Microseconds of a start beyond the latency of memory, and for each time that there are twice as
#: many CTAs, of kernels that load rows: fitted to streams on H100s and H200s.
OF_ROWS = (0.68, 0.0623)


@dataclass(frozen=True)
class Rates:
    """What the cost model knows of a device.

    Attributes
    ----------
    measured : Measured
        Rates and latencies.
    fitted : Fitted
        What they leave open.
    trees : Trees | None
        What was learned from measured kernels beyond them, if anything.
    own : tuple[OwnTerm, ...]
        Terms that a user adds, see `crossfuse.planner.cost.terms`.

    Examples
    --------
    >>> from crossfuse.hardware import device
    >>> rates_of(device("nvidia-h100")).measured.name
    'nvidia-h100'
    """

    measured: Measured
    fitted: Fitted = Fitted()
    trees: Trees | None = None
    own: tuple[OwnTerm, ...] = ()

    def tensor_rate(self, rows: Count, columns: Count, item: int) -> Share:
        """Operations a microsecond of one SM, of tiles by their shape.

        Parameters
        ----------
        rows, columns : Count
            Of a CTA's tile; between measured widths the rate is interpolated.
        item : int
            Bytes of an element: 1 or 2.

        Returns
        -------
        Share
            A number, or an array where extents are.
        """
        dtypes = {"float8_e4m3fn", "e4m3"} if item == 1 else {"bfloat16", "bf16"}
        table: dict[int, list[tuple[float, float]]] = {}
        for height, width, dtype, rate in self.measured.tensor:
            if dtype in dtypes:
                table.setdefault(height, []).append((width, rate))
        heights = sorted(table)
        found: Any = at(tuple(sorted(table[heights[0]])), columns)
        for height in heights[1:]:
            found = np.where(rows >= height, at(tuple(sorted(table[height])), columns), found)
        return found if isinstance(found, np.ndarray) and found.ndim else float(found)

    def start_time(
        self, cluster: Count, ctas: Count, own: tuple[float, float] | None = None
    ) -> Share:
        """Microseconds until the first loads of a kernel arrive; the CTAs of a cluster meet first.

        Parameters
        ----------
        cluster, ctas : Count
            CTAs of a cluster, and those that begin at the same time.
        own : tuple[float, float] | None
            Microseconds beyond the latency of memory, and for each doubling of the CTAs; None takes
            those that were fitted to kernels with rings of tiles.

        Returns
        -------
        Share
            A number, or an array where counts are.
        """
        late, crowd = own or (self.fitted.start, self.fitted.crowd)
        latency = self.measured.early_launch + self.measured.hbm
        together = latency + at(self.measured.cluster_barrier, cluster)
        return late + together + crowd * np.log2(ctas)

    def with_own(
        self,
        found: Estimate,
        kernel: TileKernel | CascadeKernel | None,
        shape: Shape | CascadeShape,
        device: Device,
    ) -> Estimate:
        """Add a user's terms to an estimate.

        Parameters
        ----------
        found : Estimate
            Without them.
        kernel, shape, device
            As `OwnTerm` has them; the kernel is None for separate kernels.

        Returns
        -------
        Estimate
            The same where there are no such terms.
        """
        if not self.own:
            return found
        times = {each.name: each.time(kernel, shape, device) for each in self.own}
        return replace(found, terms={**found.terms, **times})


def at(curve: Sequence[tuple[float, float]], size: Count) -> Share:
    """Interpolate a measured curve at a size; beyond its ends it is constant."""
    sizes, values = zip(*curve, strict=True)
    found = np.interp(size, sizes, values)
    return found if isinstance(size, np.ndarray) else float(found)


def rates_from(measured: Measured) -> Rates:
    """Take the rates of a record; constants that it lacks are as they were before any fit."""
    known = {each.name for each in fields(Fitted)}
    try:
        fitted = typed(Fitted, {key: each for key, each in measured.fitted.items() if key in known})
    except Damaged as error:
        raise refuse(
            EnvironmentRefused,
            "calibration-corrupt",
            f"fitted of {measured.name}",
            found=error.found,
            limit=error.limit,
            instead="fit the constants again: python scripts/fit_costs.py",
        ) from None
    return Rates(measured, fitted)


@checked
def rates_of(device: Device) -> Rates:
    """Rates of a device, with what was learned of it.

    Parameters
    ----------
    device : Device
        From `crossfuse.hardware.device`.

    Returns
    -------
    Rates
        In bytes and microseconds.

    Raises
    ------
    EnvironmentRefused
        If its record is not sound.

    Examples
    --------
    >>> from crossfuse.hardware import device
    >>> round(rates_of(device("nvidia-h100")).measured.hbm_read / 1e6, 2)  # TB/s
    3.13
    """
    return replace(rates_from(measured(device)), trees=trees_of(device.name))


# Rates of a record that ``crossfuse calibrate`` wrote, instead of the packaged ones.


def rates_of_file(path: Path, target: str | Device) -> Rates:
    """Read the rates of a device from a record; refused if it is another device's.

    Constants fitted to kernels are the packaged ones, unless the record has its own. What was
    learned beyond them goes with them: other constants leave other errors.
    """
    spec, record = device(target), load(path)
    if record.name != spec.name:
        raise refuse(
            PlanRefused,
            "rates",
            str(path),
            found=f"a record of {record.name}",
            limit=f"one of {spec.name}, which is planned for",
            instead=f"plan for {record.name}, or measure {spec.name} (crossfuse calibrate)",
        )
    found, packaged = rates_from(record), rates_of(spec)
    if record.fitted and found.fitted != packaged.fitted:
        return found
    return replace(packaged, measured=found.measured)
