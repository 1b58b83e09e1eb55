"""Rules on candidates, each a named predicate on arrays, and what is left after some of them.

```
on         predicate of                            keeps
block      chain, dim, extents                     block extents, dim by dim
cluster    chain, clusters                         clusters
schedule   chain, schedule                         loop schedules
room       chain, device, schedule, blocks, CTAs   candidates: the only one that ties choices
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.kernels.shape import Step
from study.dataflow.published import (
    RULES,
    Domain,
    Extents,
    LoopSchedule,
    Room,
    chosen,
    columns_in_a_cluster,
    ctas_of,
    divides,
    grid,
    published,
    several_ctas,
    tiles_walked,
)

KINDS = ("block", "cluster", "schedule", "room")


@dataclass(frozen=True)
class Rule:
    """One condition that candidates must keep."""

    #: Such as ``"R1"``.
    name: str
    #: What the rule asks for, in a few words.
    text: str
    #: One of `KINDS`; see above.
    on: str
    #: The predicate; it returns a flag, or an array of them.
    keep: Callable[..., Any]


R1 = Rule("R1", RULES["R1"], "block", divides)
R2 = Rule("R2", RULES["R2"], "cluster", several_ctas)
R3 = Rule("R3", RULES["R3"], "schedule", tiles_walked)
R4 = Rule("R4", RULES["R4"], "schedule", columns_in_a_cluster)
R5 = Rule("R5", RULES["R5"], "room", Room())
PUBLISHED = (R1, R2, R3, R4, R5)


def count(
    chain: Chain,
    device: Device,
    rules: Sequence[Rule] = PUBLISHED,
    domain: Domain | None = None,
) -> tuple[Step, ...]:
    """Count the candidates that are left after each rule in turn, and before the first.

    Rules on room must come last. The default domain is the `published` one.
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
    """Restrict a domain by a rule that is not on room."""
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
    """Flag the tiles that have room under a schedule, by CTAs of a cluster."""
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
    tiles, total = grid(left.blocks), 0
    for schedule in left.schedules:
        flags = with_room(chain, device, schedule, rules, tiles, sizes)
        for keep, each in zip(flags.values(), times, strict=True):
            total += int(np.count_nonzero(keep)) * int(each)
    return total
