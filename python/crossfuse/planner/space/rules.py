"""Rules that candidates must keep, each a predicate on arrays with a name of its own.

```
on         predicate of                            keeps
block      chain, dim, extents                     block extents, dim by dim
cluster    chain, clusters                         clusters
schedule   chain, schedule                         loop schedules
room       chain, device, schedule, blocks, CTAs   candidates: the only one that ties choices
```

R1 to R5 are FlashFuser's (arXiv 2512.12949), whose text leaves open what each of them says exactly.
Those here are the readings that give its counts; ``scripts/study/readings.py`` has others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.chain.spec import Chain, Tensor
from crossfuse.planner.dataflow.cluster import MAX_CLUSTER, row_lanes
from crossfuse.planner.dataflow.footprint import ACCUMULATOR
from crossfuse.planner.dataflow.residency import kept
from crossfuse.planner.dataflow.schedules import LoopSchedule
from crossfuse.planner.space.domain import STEP, Extents

KINDS = ("block", "cluster", "schedule", "room")
_REGISTER = 4


@dataclass(frozen=True)
class Rule:
    """One reason to leave candidates out.

    Attributes
    ----------
    name : str
        Such as ``"R1"``.
    text : str
        What it keeps, in a few words.
    on : str
        One of `KINDS`; see the module.
    keep : Callable
        The predicate; it returns a flag, or an array of them.
    """

    name: str
    text: str
    on: str
    keep: Callable[..., Any]


def divides(chain: Chain, dim: str, blocks: np.ndarray) -> np.ndarray:
    """Multiples of 16 that divide the dim; any divisors of a batch."""
    step = 1 if dim in chain.rows[:-1] else STEP
    found: np.ndarray = (blocks % step == 0) & (chain.extents[dim] % blocks == 0)
    return found


def ctas_of(chain: Chain, clusters: Extents) -> np.ndarray:
    """CTAs of clusters: rows times columns times shares of the sum of the first product."""
    first = clusters[chain.column(0)] * clusters[chain.products[0].reduction]
    return np.asarray(first * row_lanes(chain, clusters))


def several_ctas(chain: Chain, clusters: Extents) -> np.ndarray:
    """2 to 16 CTAs, and whole shuffle groups: cls_l is a multiple of cls_k."""
    ctas = ctas_of(chain, clusters)
    found = (ctas > 1) & (ctas <= MAX_CLUSTER)
    share = clusters[chain.products[0].reduction]
    for index in range(1, len(chain.products)):
        found &= clusters[chain.column(index)] % share == 0
    return found


def sum_before_use(chain: Chain, schedule: LoopSchedule) -> bool:
    """The first reduction is innermost or spatial: sums are whole before they are activated."""
    dim = chain.products[0].reduction
    return dim in schedule.spatial or schedule.order[-1] == dim


def tiles_walked(chain: Chain, schedule: LoopSchedule) -> bool:
    """As `sum_before_use`, and another loop is walked."""
    others = [each for each in schedule.order if each != chain.products[0].reduction]
    return bool(others) and sum_before_use(chain, schedule)


def columns_in_a_cluster(chain: Chain, schedule: LoopSchedule) -> bool:
    """Columns of later products are not spatial: other clusters have none of the intermediate."""
    later = (chain.column(index) for index in range(1, len(chain.products)))
    return not any(each in schedule.spatial for each in later)


@dataclass(frozen=True)
class Room:
    """Each tensor alone fits the lowest memory that it may spill to.

    Inputs: a tile in shared memory. Intermediates: what is held, as sums in float32, in the shared
    memory of all CTAs together. The output: the sums that are partial at once, in registers. The
    fields make other readings of it.

    Attributes
    ----------
    sums : bool
        Whether intermediates take the bytes of sums; else those of stored elements.
    held : bool
        Whether all that is held at once counts; else one tile.
    cluster : bool
        Whether an intermediate has the shared memory of the cluster; else that of one CTA.
    output : bool
        Whether the output has a limit.
    """

    sums: bool = True
    held: bool = True
    cluster: bool = True
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
