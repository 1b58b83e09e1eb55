"""What a device does in a microsecond, and how long it takes to begin: numbers for the cost model.

The record of a device has two parts: what microbenchmarks measure, and what was fitted to the
times of whole kernels (`scripts/fit_costs.py`). Where nothing was measured yet, the packaged record
says ``"provisional": true``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.dataflow.counts import Count, Share

Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Fitted:
    """What no microbenchmark gives: least squares over measured kernels.

    Attributes
    ----------
    start : float
        From the end of the kernel before to the first tiles in shared memory, beside the latencies
        of the record; us.
    crowd : float
        How much longer that takes for each doubling of the CTAs that begin; us.
    hbm, l2, ingest, tensor : float
        Share of the measured rates that kernels reach.
    step : float
        Least time of a step of the ring; us.
    copy : float
        Time to ask for a copy, of which a step has one for each box of a tile; us.
    again : float
        Share of the bytes that tiles one below the other read in common which come from memory
        again.
    spill : float
        Of the second product in a cluster, for an element of its reduction, where registers do not
        hold the sums; us.
    column, gated : float
        Epilogue of a column of 64 rows: of a plain activation, and of gate and up; us.
    flag : float
        From a stored tile of an intermediate to the first one that another SM has loaded; us.
    relaunch : float
        The same from one kernel to the next; us.
    queue : float
        Share of the weights on their way to an SM that it waits for then.
    imbalance : float
        By which share of a phase its last CTA is behind where others wait for it.
    exchange : float
        Partial sums through DSM beside their bytes, for each CTA that shares a sum; us.
    push : float
        Share of the measured rate at which partial sums are sent and added.
    gather : float
        Slices of an intermediate through DSM, likewise; us.
    sums, part : float
        Partial sums through L2, likewise, and for each part; us.
    summed : float
        Time of a CTA's partial sums through L2, in times of taking in as many bytes.
    store : float
        From the last sum to the end of the kernel; us.
    library, library_tensor, library_kernel : float
        Kernels of cuBLAS: shares of memory's rate and of the tensor cores' that they reach; time
        for each, in a graph; us.
    """

    start: float = 0.5
    crowd: float = 0.2
    hbm: float = 1.0
    l2: float = 1.0
    ingest: float = 0.8
    tensor: float = 0.8
    step: float = 0.05
    copy: float = 0.03
    again: float = 0.3
    spill: float = 0.08
    column: float = 0.01
    gated: float = 0.02
    flag: float = 2.0
    relaunch: float = 3.0
    queue: float = 0.2
    imbalance: float = 0.1
    exchange: float = 0.1
    push: float = 0.6
    gather: float = 1.0
    sums: float = 2.5
    part: float = 0.1
    summed: float = 1.0
    store: float = 1.0
    library: float = 0.8
    library_tensor: float = 0.6
    library_kernel: float = 2.5


@dataclass(frozen=True)
class Rates:
    """A device's record.

    Attributes
    ----------
    name : str
        Of the device.
    hbm_read, hbm_write, l2_read, l2_write : float
        Bytes a microsecond of all SMs.
    sm_ingest : float
        Bytes a microsecond that one SM takes in by TMA.
    multicast_ingest : tuple[tuple[float, float], ...]
        The same by multicast, by cluster size.
    dsm_push : tuple[tuple[float, float], ...]
        Bytes a microsecond that one SM sends to peers, by cluster size.
    tensor : tuple[tuple[float, float, str, float], ...]
        Rows and columns of a tile, type, and operations a microsecond of one SM.
    hbm, l2, dsm, flag, launch, early_launch : float
        Latencies in microseconds.
    cluster_barrier : tuple[tuple[float, float], ...]
        Microseconds by cluster size.
    resident : tuple[tuple[float, float], ...]
        Clusters at the same time, by size.
    fitted : Fitted
        See there.
    provisional : bool
        Whether rates and latencies are taken from other measurements than those of the record.
    """

    name: str
    hbm_read: float
    hbm_write: float
    l2_read: float
    l2_write: float
    sm_ingest: float
    multicast_ingest: Curve
    dsm_push: Curve
    tensor: tuple[tuple[float, float, str, float], ...]
    hbm: float
    l2: float
    dsm: float
    flag: float
    launch: float
    early_launch: float
    cluster_barrier: Curve
    resident: Curve = ()
    fitted: Fitted = Fitted()
    provisional: bool = False

    def tensor_rate(self, rows: Count, columns: Count, item: int) -> Share:
        """Operations a microsecond of one SM, of tiles by their shape.

        Parameters
        ----------
        rows, columns : Count
            Of a CTA's tile; between measured widths the rate is interpolated.
        item : int
            Bytes of an element: 1 or 2.
        """
        dtypes = {"float8_e4m3fn", "e4m3"} if item == 1 else {"bfloat16", "bf16"}
        table: dict[float, list[tuple[float, float]]] = {}
        for height, width, dtype, rate in self.tensor:
            if dtype in dtypes:
                table.setdefault(height, []).append((width, rate))
        heights = sorted(table)
        found: Any = at(tuple(sorted(table[heights[0]])), columns)
        for height in heights[1:]:
            found = np.where(rows >= height, at(tuple(sorted(table[height])), columns), found)
        return found if isinstance(found, np.ndarray) and found.ndim else float(found)


def at(curve: Sequence[tuple[float, float]], size: Count) -> Share:
    """A measured curve at a size: between two points a line, beyond them the last one."""
    sizes, values = zip(*curve, strict=True)
    found = np.interp(size, sizes, values)
    return found if isinstance(size, np.ndarray) else float(found)


def read_rates(document: Mapping[str, Any]) -> Rates:
    """Make a record of a JSON document.

    Raises
    ------
    PlanRefused
        If a field is missing.
    """
    wanted = [each.name for each in fields(Rates)]
    optional = ("fitted", "provisional", "resident")
    missing = [each for each in wanted if each not in document and each not in optional]
    if missing:
        raise refuse(
            PlanRefused,
            "rates",
            str(document.get("name", "record")),
            found=f"no {', '.join(missing)}",
            limit="every rate and latency of the record",
            instead="measure the device again (scripts/calibrate.py)",
        )
    values = {each: _frozen(document[each]) for each in wanted if each in document}
    known = {each.name for each in fields(Fitted)}
    fitted = {key: each for key, each in document.get("fitted", {}).items() if key in known}
    return Rates(**{**values, "fitted": Fitted(**fitted)})


@lru_cache(maxsize=8)
def rates_of(device: Device) -> Rates:
    """The packaged record of a device.

    Raises
    ------
    PlanRefused
        If there is none.
    """
    place = resources.files("crossfuse.planner.cost").joinpath(f"records/{device.name}.json")
    if not place.is_file():
        raise refuse(
            PlanRefused,
            "rates",
            device.name,
            found="no record",
            limit="a device that was measured",
            instead="measure it (scripts/calibrate.py), or plan for nvidia-h100",
        )
    return read_rates(json.loads(place.read_text("utf-8")))


def _frozen(value: Any) -> Any:
    """Lists as tuples, so that records can be compared and hashed."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
