"""How many tiles of a family each rule leaves."""

from __future__ import annotations

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.kernels.every import count, families, fitting, possible, select
from crossfuse.planner.kernels.shape import Shape
from crossfuse.planner.space.count import Step


def pruned(family: str, shape: Shape, device: Device) -> tuple[Step, ...]:
    """Count the tiles that are left after each rule in turn.

    Parameters
    ----------
    family : str
        One of `crossfuse.planner.families.FAMILIES`.
    shape : Shape
        What is computed.
    device : Device
        Its limits.

    Returns
    -------
    tuple[Step, ...]
        ``"all"``, the family's rules, and ``"shared"``. After the last one as many are left as
        `crossfuse.planner.kernels.every.every` makes.
    """
    found = possible(family, shape)
    left = np.ones(count(found), bool)
    steps = [Step("all", "tiles that are tried", len(left))]
    for rule in found.rules(shape, device):
        left &= np.asarray(rule.keeps, bool)
        steps.append(Step(rule.name, rule.text, int(np.count_nonzero(left))))
    few = select(found, left)
    fits = int(np.count_nonzero(fitting(few, shape, device))) if count(few) else 0
    room = f"two stages of each ring fit {device.max_shared_bytes >> 10} KiB of shared memory"
    return (*steps, Step("shared", room, fits))


def why_none(family: str, shape: Shape, device: Device) -> str:
    """Why a family has no tiles that fit: the rule after which none were left."""
    if family not in families(shape):
        return f"{family} has no kernels of {'two products' if shape.l else 'one product'}"
    steps = pruned(family, shape, device)
    last = next((each for each in steps if not each.candidates), steps[-1])
    return f"'{last.text}' leaves {last.candidates} of {steps[0].candidates} tiles of {family}"
