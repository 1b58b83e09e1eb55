"""How many candidates each rule leaves, counted without making them.

Schedules, blocks and clusters are counted apart and multiplied. Only rules on room look at
candidates, and those ask of a cluster nothing but how many CTAs it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.chain.spec import Chain, Tensor
from crossfuse.planner.dataflow.cluster import MAX_CLUSTER, row_lanes
from crossfuse.planner.dataflow.schedules import LoopSchedule, kept, loop_schedules
from crossfuse.planner.dataflow.volume import ACCUMULATOR
from crossfuse.planner.kernels.shape import Step

# Domains of candidates: loop schedules, block tiles, and extents of clusters.
#
# A candidate is a schedule, a block extent for each dim and a cluster extent for each dim. These
# are independent of each other until a rule ties them together, so that a space is counted without
# making it: as schedules times block tiles times clusters.

#: Blocks are multiples of this: the columns of the smallest tile that tensor cores like.
STEP = 16
#: CTAs of a cluster along each dim, as published.
CLUSTER_EXTENTS = (1, 2, 4, 8, 16)

Extents = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Domain:
    """Three independent choices."""

    schedules: tuple[LoopSchedule, ...]
    #: Extents of a CTA's tile, by dim.
    blocks: Mapping[str, tuple[int, ...]]
    #: CTAs along each dim, an entry for each cluster.
    clusters: Extents

    @property
    def cluster_count(self) -> int:
        """Clusters that are left."""
        return len(next(iter(self.clusters.values())))

    @property
    def size(self) -> int:
        """Candidates, counted and not made."""
        tiles = prod(len(each) for each in self.blocks.values())
        return len(self.schedules) * self.cluster_count * tiles

    def tiles(self) -> dict[str, np.ndarray]:
        """All block tiles, the last dim fastest: an array for each dim."""
        return grid(self.blocks)


def grid(choices: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """All combinations of some choices, the last one fastest: an array of float64 for each name.

    Counts are float64, see `crossfuse.planner.counts`.
    """
    values = [np.asarray(each, dtype=np.float64) for each in choices.values()]
    return {
        name: each.ravel()
        for name, each in zip(choices, np.meshgrid(*values, indexing="ij"), strict=True)
    }


def chosen(extents: Extents, keep: np.ndarray) -> dict[str, np.ndarray]:
    """Select the entries that a flag or an index picks."""
    return {name: each[keep] for name, each in extents.items()}


def published(
    chain: Chain, *, step: int = STEP, cluster_extents: Iterable[int] = CLUSTER_EXTENTS
) -> Domain:
    """Make the space that FlashFuser starts from (arXiv 2512.12949, section on the search engine).

    It is all schedules, times clusters of `cluster_extents` CTAs along each dim, times the
    multiples of `step` up to the extent, at least one, for each dim.
    """
    names, sizes = list(chain.extents), tuple(cluster_extents)
    clusters = grid(dict.fromkeys(names, sizes))
    return Domain(tuple(loop_schedules(names)), blocks_of(chain, step), clusters)


def blocks_of(chain: Chain, step: int = STEP) -> dict[str, tuple[int, ...]]:
    """Multiples of a step up to the extent, by dim, and the step at least; any of a batch."""
    batch = chain.rows[:-1]
    steps = {dim: 1 if dim in batch else step for dim in chain.extents}
    return {
        dim: tuple(range(steps[dim], max(extent, steps[dim]) + 1, steps[dim]))
        for dim, extent in chain.extents.items()
    }


# Rules on candidates, each a named predicate on arrays.
#
# ```
# on         predicate of                            keeps
# block      chain, dim, extents                     block extents, dim by dim
# cluster    chain, clusters                         clusters
# schedule   chain, schedule                         loop schedules
# room       chain, device, schedule, blocks, CTAs   candidates: the only one that ties choices
# ```
#
# R1 to R5 are FlashFuser's (arXiv 2512.12949), whose text leaves open what each of them says
# exactly. Those here are the readings that give its counts; ``scripts/study/readings.py`` has
# others.

KINDS = ("block", "cluster", "schedule", "room")
_REGISTER = 4


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


def divides(chain: Chain, dim: str, blocks: np.ndarray) -> np.ndarray:
    """Flag multiples of 16 that divide the dim; any divisors of a batch."""
    step = 1 if dim in chain.rows[:-1] else STEP
    found: np.ndarray = (blocks % step == 0) & (chain.extents[dim] % blocks == 0)
    return found


def ctas_of(chain: Chain, clusters: Extents) -> np.ndarray:
    """CTAs of clusters: rows times columns times shares of the sum of the first product."""
    first = clusters[chain.column(0)] * clusters[chain.products[0].reduction]
    return np.asarray(first * row_lanes(chain, clusters))


def several_ctas(chain: Chain, clusters: Extents) -> np.ndarray:
    """Flag clusters of 2 to 16 CTAs with whole shuffle groups: cls_l is a multiple of cls_k."""
    ctas = ctas_of(chain, clusters)
    found = (ctas > 1) & (ctas <= MAX_CLUSTER)
    share = clusters[chain.products[0].reduction]
    for index in range(1, len(chain.products)):
        found &= clusters[chain.column(index)] % share == 0
    return found


def sum_before_use(chain: Chain, schedule: LoopSchedule) -> bool:
    """Whether the first reduction is innermost or spatial: sums are whole when activated."""
    dim = chain.products[0].reduction
    return dim in schedule.spatial or schedule.order[-1] == dim


def tiles_walked(chain: Chain, schedule: LoopSchedule) -> bool:
    """Whether `sum_before_use` holds, and another loop is walked."""
    others = [each for each in schedule.order if each != chain.products[0].reduction]
    return bool(others) and sum_before_use(chain, schedule)


def columns_in_a_cluster(chain: Chain, schedule: LoopSchedule) -> bool:
    """Whether no columns of later products are spatial: other clusters have no intermediate."""
    later = (chain.column(index) for index in range(1, len(chain.products)))
    return not any(each in schedule.spatial for each in later)


@dataclass(frozen=True)
class Room:
    """Predicate that each tensor alone fits the lowest memory that it may spill to.

    Inputs: a tile in shared memory. Intermediates: all held elements, as float32 sums, in the
    shared memory of all CTAs together. The output: the sums that are partial at once, in registers.
    The fields make other readings of it.
    """

    #: Whether intermediates take the bytes of sums; else those of stored elements.
    sums: bool = True
    #: Whether all that is held at once counts; else one tile.
    held: bool = True
    #: Whether an intermediate has the shared memory of the cluster; else that of one CTA.
    cluster: bool = True
    #: Whether the output has a limit.
    output: bool = True

    def __call__(
        self,
        chain: Chain,
        device: Device,
        schedule: LoopSchedule,
        blocks: Extents,
        ctas: np.ndarray,
    ) -> np.ndarray:
        """Flag the candidates that fit: with blocks [n] and `ctas` [n], or [sizes, 1] for all."""
        inner, hold = len(schedule.order), kept(chain, schedule).hold
        shared = device.max_shared_bytes
        found = np.ones(np.broadcast(ctas, next(iter(blocks.values()))).shape, dtype=bool)
        for tensor in chain.tensors:
            if tensor.role == "input":
                size = live(chain, schedule, tensor, blocks, inner) * tensor.item
                found &= size <= shared
            elif tensor.role == "intermediate":
                position = hold[tensor.name] if self.held else inner
                size = live(chain, schedule, tensor, blocks, position)
                size = size * (ACCUMULATOR if self.sums else tensor.item)
                found &= size <= (shared * ctas if self.cluster else shared)
            elif self.output:
                reduction = schedule.position(chain.products[-1].reduction)
                position = reduction if self.held and reduction >= 0 else inner
                size = live(chain, schedule, tensor, blocks, position) * ACCUMULATOR
                found &= size <= device.registers * _REGISTER
        return found


def live(
    chain: Chain, schedule: LoopSchedule, tensor: Tensor, blocks: Extents, hold: int
) -> np.ndarray:
    """Elements of a tensor at once: dims walked inside a position whole, a block of others."""
    count = np.ones(1)
    for dim in tensor.dims:
        inside = schedule.position(dim) >= hold
        count = count * (chain.extents[dim] if inside else blocks[dim])
    return count


R1 = Rule("R1", "tiles are multiples of 16 that divide", "block", divides)
R2 = Rule("R2", "2 to 16 CTAs, cls_k divides cls_l", "cluster", several_ctas)
R3 = Rule("R3", "k innermost or spatial, and another loop walked", "schedule", tiles_walked)
R4 = Rule("R4", "l not spatial", "schedule", columns_in_a_cluster)
R5 = Rule("R5", "each tensor fits where it may spill to", "room", Room())
PUBLISHED = (R1, R2, R3, R4, R5)


def count(
    chain: Chain,
    device: Device,
    rules: Sequence[Rule] = PUBLISHED,
    domain: Domain | None = None,
) -> tuple[Step, ...]:
    """Count the candidates that are left after each rule in turn, and before the first.

    Rules on room must come last. The default domain is the `published` one.

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
    tiles, total = left.tiles(), 0
    for schedule in left.schedules:
        flags = with_room(chain, device, schedule, rules, tiles, sizes)
        for keep, each in zip(flags.values(), times, strict=True):
            total += int(np.count_nonzero(keep)) * int(each)
    return total
