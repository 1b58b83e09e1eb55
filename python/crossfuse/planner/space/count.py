"""How many candidates each rule leaves, counted without making them.

Schedules, blocks and clusters are counted apart and multiplied. Only rules on room look at
candidates, and those ask of a cluster nothing but how many CTAs it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.dataflow.schedules import LoopSchedule
from crossfuse.planner.space.domain import Domain, Extents, chosen, published
from crossfuse.planner.space.rules import KINDS, PUBLISHED, Rule, ctas_of


@dataclass(frozen=True)
class Step:
    """Candidates after a rule.

    Attributes
    ----------
    name, text : str
        The rule's; ``"all"`` before the first one.
    candidates : int
        That are left.
    """

    name: str
    text: str
    candidates: int


def count(
    chain: Chain,
    device: Device,
    rules: Sequence[Rule] = PUBLISHED,
    domain: Domain | None = None,
) -> tuple[Step, ...]:
    """Count the candidates that are left after each rule in turn.

    Parameters
    ----------
    chain : Chain
        Of any number of products.
    device : Device
        Whose room it is.
    rules : Sequence[Rule]
        In order, those on room last.
    domain : Domain | None
        Where they start from; the `published` one unless told.

    Returns
    -------
    tuple[Step, ...]
        One more than there are rules.

    Raises
    ------
    PlanRefused
        For kinds of rules that there are none of, and other rules after one on room.

    Examples
    --------
    >>> from crossfuse.hardware import device
    >>> from crossfuse.planner.chain.build import matrix_chain
    >>> chain = matrix_chain(256, [4096, 16384, 4096])
    >>> [f"{each.candidates:.2e}" for each in count(chain, device("nvidia-h100"))]
    ['2.75e+13', '1.14e+08', '2.47e+07', '1.44e+07', '9.62e+06', '1.15e+06']
    """
    check_rules(rules)
    left = domain or published(chain)
    steps = [Step("all", "", left.size)]
    room: list[Rule] = []
    for rule in rules:
        if rule.on == "room":
            room.append(rule)
            candidates = _with_room(chain, device, left, room)
        else:
            left = narrowed(chain, left, rule)
            candidates = left.size
        steps.append(Step(rule.name, rule.text, candidates))
    return tuple(steps)


def narrowed(chain: Chain, domain: Domain, rule: Rule) -> Domain:
    """What a rule that is not on room leaves of a domain."""
    if rule.on == "block":
        blocks = {
            dim: tuple(int(each) for each in _kept(chain, rule, dim, values))
            for dim, values in domain.blocks.items()
        }
        return replace(domain, blocks=blocks)
    if rule.on == "cluster":
        keep = rule.keep(chain, domain.clusters)
        return replace(domain, clusters=chosen(domain.clusters, keep))
    schedules = tuple(each for each in domain.schedules if rule.keep(chain, each))
    return replace(domain, schedules=schedules)


def with_room(
    chain: Chain,
    device: Device,
    schedule: LoopSchedule,
    rules: Sequence[Rule],
    tiles: Extents,
    sizes: np.ndarray,
) -> dict[float, np.ndarray]:
    """Say which tiles have room under a schedule, by CTAs of a cluster."""
    # All sizes at once: what is held of a tensor is the same for all of them.
    keep = np.ones((len(sizes), len(next(iter(tiles.values())))), dtype=bool)
    for rule in rules:
        keep &= rule.keep(chain, device, schedule, tiles, sizes[:, None])
    return {float(size): each for size, each in zip(sizes, keep, strict=True)}


def check_rules(rules: Sequence[Rule]) -> None:
    """Refuse rules that cannot be counted in this order."""
    ended = False
    for rule in rules:
        late = ended and rule.on != "room"
        if rule.on not in KINDS or late:
            raise refuse(
                PlanRefused,
                "search-space",
                f"rule {rule.name}",
                found=f"on {rule.on!r}" + (" after a rule on 'room'" if late else ""),
                limit="on one of " + ", ".join(KINDS) + ", those on room last",
                instead="move it, since a rule on room looks at all that is left",
            )
        ended = ended or rule.on == "room"


def _kept(chain: Chain, rule: Rule, dim: str, values: Sequence[int]) -> np.ndarray:
    extents = np.asarray(values, dtype=np.int64)
    return np.asarray(extents[rule.keep(chain, dim, extents)])


def _with_room(chain: Chain, device: Device, left: Domain, rules: Sequence[Rule]) -> int:
    sizes, times = np.unique(ctas_of(chain, left.clusters), return_counts=True)
    tiles, total = left.tiles(), 0
    for schedule in left.schedules:
        flags = with_room(chain, device, schedule, rules, tiles, sizes)
        for keep, each in zip(flags.values(), times, strict=True):
            total += int(np.count_nonzero(keep)) * int(each)
    return total
