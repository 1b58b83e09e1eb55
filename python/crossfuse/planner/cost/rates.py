"""Rates and latencies of a device for the cost model.

The record of a device has two parts: what microbenchmarks measure (``crossfuse calibrate``), and
what was fitted to the times of whole kernels (`scripts/fit_costs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from crossfuse.calls import checked
from crossfuse.errors import EnvironmentRefused, PlanRefused, refuse
from crossfuse.hardware import Device, device
from crossfuse.planner.calibration.record import Measured, load, measured
from crossfuse.planner.cost.own import OwnTerm
from crossfuse.planner.cost.terms import Estimate, Trees, trees_of
from crossfuse.planner.kernels.shape import Count, Shape, Share
from crossfuse.schema import Damaged, Positive, typed

if TYPE_CHECKING:
    from crossfuse.planner.cascade.shape import CascadeShape
    from crossfuse.planner.families.cascade import CascadeKernel
    from crossfuse.planner.kernels.kernel import TileKernel


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
        Terms that a user adds, see `crossfuse.planner.cost.own`.

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
