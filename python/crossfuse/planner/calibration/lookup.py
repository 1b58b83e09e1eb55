"""The record of a device: its user's, the packaged one, or that of the nearest one, scaled."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from math import log

from crossfuse.hardware import DEVICES, Device, device, record_path
from crossfuse.planner.calibration.record import Measured, load, shipped


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
