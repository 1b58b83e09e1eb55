"""Traffic between the CTAs of a cluster, and what clusters add through L2.

With the letters of `crossfuse.planner.dataflow.cluster`, e elements of a tile, b bytes of a stored
element and a bytes of a partial sum:

```
all-exchange      s = split CTAs have partial sums of one tile; all of them need it whole

  partial   0: [....]  1: [....]       reduce-scatter: CTA i gets slice i from s - 1 peers,
  reduced   0: [ab  ]  1: [  cd]         (s - 1) e a in all
  whole     0: [abcd]  1: [abcd]       all-gather: slice i goes to s - 1 peers, (s - 1) e b in all
                                       naive: each sends all it has to each peer, s (s - 1) e a

shuffle           g CTAs of a shuffle group have a tile each and need all g

  has       0: [A.]  1: [.B]           as a ring or all at once, each gets g - 1 tiles:
  needs     0: [AB]  1: [AB]             X (g - 1) e b in all for the X CTAs of a row

reduce-scatter    s = split CTAs have partial sums of one tile of the output; each keeps a slice

  partial   0: [....]  1: [....]         (s - 1) e a in all
  reduced   0: [ab  ]  1: [  cd]

between clusters  c clusters have partial sums of the same output, which L2 adds: c e a
```

Totals are exact for tiles of any size, clipped ones too. Every CTA of a group takes part, also one
whose share of the sum or whose columns lie beyond the edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.counts import Count
from crossfuse.planner.dataflow.cluster import cluster_lanes
from crossfuse.planner.dataflow.schedules import Residency
from crossfuse.planner.dataflow.volume import (
    ACCUMULATOR,
    Nest,
    elements_made,
    elements_moved,
    sums_of,
)

METHODS = ("scatter", "naive")


def combined_bytes(
    elements: Count, split: Count, item: int, accumulator: Count, method: str = "scatter"
) -> Count:
    """Bytes by which `split` CTAs combine partial tiles, of any size, and all have the result.

    `split` are shares of the sum, or two for gate and up; `item` and `accumulator` are bytes of an
    element of the result, and of a partial one. ``"scatter"`` is a reduce-scatter of partial sums,
    then an all-gather of results; with ``"naive"`` each sends its partial tile to each other and
    all combine, in one step.
    """
    if method not in METHODS:
        raise refuse(
            PlanRefused,
            "exchange",
            "method of all_exchange",
            found=repr(method),
            limit="one of " + ", ".join(METHODS),
            instead="write 'scatter', which moves the fewest bytes",
        )
    if method == "naive":
        return split * (split - 1) * elements * accumulator
    return (split - 1) * elements * (accumulator + item)


@dataclass(frozen=True)
class Exchanges:
    """Bytes that the CTAs of all clusters send each other over a whole run, by primitive."""

    #: By intermediate.
    all_exchange: Mapping[str, Count]
    shuffle: Mapping[str, Count]
    #: Of the output.
    reduce_scatter: Count

    @property
    def total(self) -> Count:
        """Sum over all primitives."""
        parts = (*self.all_exchange.values(), *self.shuffle.values(), self.reduce_scatter)
        total: Count = 0
        for each in parts:
            total = total + each
        return total


def exchanges(
    chain: Chain,
    cluster: Mapping[str, Count],
    made: tuple[Nest, ...],
    residency: Residency,
    *,
    method: str = "scatter",
) -> Exchanges:
    """Count what a whole run exchanges; `made` are the nests of clusters, see `nests` of `volume`.

    A grid-wide intermediate goes through L2: each CTA stores the slice that it reduced, so that
    there is neither an all-gather nor a shuffle.
    """
    lanes = cluster_lanes(chain, cluster)
    combined: dict[str, Count] = {}
    shuffled: dict[str, Count] = {}
    for index, tensor in enumerate(chain.intermediates):
        terms = sums_of(chain, cluster, index)
        elements = elements_made(made[index], tensor.dims)
        split, group = lanes[index].split, lanes[index + 1].shuffle
        size = ACCUMULATOR * terms
        if tensor.name in residency.grid_wide:
            combined[tensor.name] = (split - 1) * elements * size
            continue
        combined[tensor.name] = combined_bytes(elements, split, tensor.item, size, method)
        # Each share of the sum has the tiles whole and serves its own shuffle groups.
        shuffled[tensor.name] = split * (group - 1) * elements * tensor.item
    output = chain.output
    hold = residency.position(output, made[-1].schedule)
    elements = elements_moved(made[-1], output.dims, hold)
    size = ACCUMULATOR * sums_of(chain, cluster, len(chain.products) - 1)
    stored = (lanes[-1].split - 1) * elements * size
    return Exchanges(combined, shuffled, stored)
