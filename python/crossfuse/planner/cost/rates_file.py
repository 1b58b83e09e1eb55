"""Rates of a record that ``crossfuse calibrate`` wrote, in the place of the packaged ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device, device
from crossfuse.planner.calibration.record import load
from crossfuse.planner.cost.rates import Rates, rates_from, rates_of


def rates_of_file(path: Path, target: str | Device) -> Rates:
    """Read the rates of a device from a file.

    Parameters
    ----------
    path : pathlib.Path
        A record, see `crossfuse.planner.calibration.record`.
    target : str | Device
        The device that is planned for.

    Returns
    -------
    Rates
        What the record says. Constants fitted to kernels are the packaged ones, unless the record
        has its own. What was learned beyond them goes with them: other constants leave other
        errors.

    Raises
    ------
    EnvironmentRefused
        If the file is unreadable, stale or corrupt.
    PlanRefused
        If it is another device's.
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
