"""A device of which a plan may use a part only."""

from __future__ import annotations

from dataclasses import replace

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device, device


def limited(target: str | Device | None, *, max_cluster: int = 0, shared_bytes: int = 0) -> Device:
    """Take a device's limits down.

    Parameters
    ----------
    target : str | Device | None
        The device.
    max_cluster : int
        CTAs of a cluster at most; 0 leaves it. Up to 8 are portable.
    shared_bytes : int
        Shared memory of a CTA at most; 0 leaves it.

    Returns
    -------
    Device
        With these limits.

    Raises
    ------
    PlanRefused
        If the device has less.
    EnvironmentRefused
        If it is unknown.
    """
    spec = device(target)
    given = {"max_cluster": max_cluster, "max_shared_bytes": shared_bytes}
    for name, value in given.items():
        most = getattr(spec, name)
        if not 0 <= value <= most:
            raise refuse(
                PlanRefused,
                "budget",
                name,
                found=value,
                limit=f"1 to {most}, what {spec.name} has, or 0 to take that",
                instead="ask for less, or leave the limit out",
            )
    return replace(
        spec,
        max_cluster=max_cluster or spec.max_cluster,
        max_shared_bytes=shared_bytes or spec.max_shared_bytes,
    )
