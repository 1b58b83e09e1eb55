"""How the CTAs of a cluster divide each product of a chain.

One vector of extents, ``cls_m, cls_k, cls_n, cls_l``, says it for all products, because the CTAs
that make the intermediate are those that read it. For each row of CTAs (``cls_m`` of them):

```
first product, cls_n = 4 columns, cls_k = 2 shares of the sum       8 CTAs

            n0   n1   n2   n3          (n, k) makes a partial tile of C; after the all-exchange
       k0   0    2    4    6           of a column, both its CTAs have the tile whole
       k1   1    3    5    7

second product, cls_l = 4 columns: cls_shuffle = cls_l / cls_k = 2 tiles of C are gathered in each
shuffle group, and cls_reduce = cls_n / cls_shuffle = 2 shares of the sum over n remain

            l0   l1   l2   l3          CTA (n, k) takes columns l = (n % cls_shuffle) * cls_k + k
   n0 n1    0    1    2    3           and share n // cls_shuffle of the sum
   n2 n3    4    5    6    7           shuffle groups: {0,2} {1,3} {4,6} {5,7}
                                       summed at the store: {0,4} {1,5} {2,6} {3,7}
```

The same holds from any product to the next: the shares of product p take the place of ``cls_k``.
With X CTAs in a row, ``split_p = X / columns_p`` and ``shuffle_p = columns_p / split_(p-1)``, which
is also ``columns_(p-1) / split_p``.

Gate and up can be on two CTAs: ``terms = 2`` in the vector. Both have the same left tiles, one
weight each, and sums of one weight. In the all-exchange they are two more shares of a tile, so that
``cls_k * terms`` stands where ``cls_k`` does above; only the reduction is not divided by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from crossfuse.errors import PlanRefused, RefusedError, refuse
from crossfuse.hardware import Device
from crossfuse.planner.chain.spec import TERMS, Chain
from crossfuse.planner.kernels.shape import Count, Flag, most

#: CTAs in a cluster at most, with the launch attribute for sizes beyond 8.
MAX_CLUSTER = Device.max_cluster


def floor_div(count: Count, size: Count) -> Count:
    """Number of `size` that fit into `count`."""
    if isinstance(count, np.ndarray) or isinstance(size, np.ndarray):
        return np.floor(np.divide(count, size))
    return count // size


@dataclass(frozen=True)
class Lanes:
    """CTAs of one row of a cluster, as one product sees them."""

    #: Tiles of the output side by side.
    columns: Count
    #: Shares of the sum, times terms; ``columns * split`` is the same for all products.
    split: Count
    #: Tiles of the left operand that a CTA multiplies: its own and those of the other CTAs of its
    #: shuffle group. 1 for the first product, which loads its operand.
    shuffle: Count


def row_lanes(chain: Chain, cluster: Mapping[str, Count]) -> Count:
    """Rows of CTAs in a cluster: ``cls_m``, times the batch."""
    rows: Count = 1
    for dim in chain.rows:
        rows = rows * cluster.get(dim, 1)
    return rows


def cluster_lanes(chain: Chain, cluster: Mapping[str, Count]) -> tuple[Lanes, ...]:
    """Divide each product of a chain between the CTAs of a row; the cluster must be legal.

    A cluster is CTAs along each dim, and of ``"terms"``; 1 where absent.
    """
    split, first = _shares(chain, cluster), cluster.get(chain.column(0), 1)
    lanes, row = [Lanes(first, split, 1)], first * split
    for index in range(1, len(chain.products)):
        columns = cluster.get(chain.column(index), 1)
        lanes.append(Lanes(columns, floor_div(row, columns), floor_div(columns, lanes[-1].split)))
    return tuple(lanes)


def legal_cluster(chain: Chain, cluster: Mapping[str, Count], limit: int = MAX_CLUSTER) -> Flag:
    """Whether the CTAs divide evenly and are no more than `limit`; see `check_cluster`."""
    split, first = _shares(chain, cluster), cluster.get(chain.column(0), 1)
    row = first * split
    legal: Flag = row * row_lanes(chain, cluster) <= limit
    legal = legal & (len(chain.products[0].rights) % cluster.get(TERMS, 1) == 0)
    for index in range(1, len(chain.products)):
        columns = cluster.get(chain.column(index), 1)
        legal = legal & (row % columns == 0) & (columns % split == 0)
        # What does not divide is illegal already; only a division by 0 must not follow.
        split = most(floor_div(row, columns), 1)
    return legal


def check_cluster(chain: Chain, cluster: Mapping[str, int], limit: int = MAX_CLUSTER) -> None:
    """Refuse a cluster that cannot be; `legal_cluster` says the same of many at once.

    These are dims that the chain lacks, extents below 1, more CTAs than `limit`, terms that do not
    divide the weights, and columns that do not divide the CTAs of a row (cls_reduce) or are no
    multiple of the shares before (cls_shuffle).
    """
    terms = len(chain.products[0].rights)
    for dim, extent in cluster.items():
        if dim not in (*chain.extents, TERMS) or type(extent) is not int or extent < 1:
            allowed = "positive integers along " + ", ".join(chain.extents)
            raise _refused(f"cls_{dim}", extent, allowed, "leave out dims that are not divided")
    if terms % cluster.get(TERMS, 1):
        limits = f"divisors of {terms}, the weights of the first product"
        raise _refused(TERMS, cluster[TERMS], limits, "leave it out")
    first, split = chain.column(0), int(_shares(chain, cluster))
    row, rows = cluster.get(first, 1) * split, row_lanes(chain, cluster)
    if row * rows > limit:
        reduction = chain.products[0].reduction
        names = " * ".join(f"cls_{each}" for each in (*chain.rows, first, reduction))
        names += f" * {TERMS}" if TERMS in cluster else ""
        raise _refused("cluster", f"{row * rows} CTAs, {names}", f"{limit} CTAs", "take fewer")
    for index in range(1, len(chain.products)):
        column = chain.column(index)
        columns = cluster.get(column, 1)
        if columns % split:
            found = f"{columns}, which {split} CTAs that share a tile do not divide"
            limits = f"multiples of {split}, so that a shuffle group has whole tiles"
            raise _refused(f"cls_{column}", found, limits, f"write cls_{column}={split}, say")
        if row % columns:
            found = f"{columns}, which does not divide the {row} CTAs of a row"
            limits = f"divisors of {row}, so that every CTA has columns of this product"
            raise _refused(f"cls_{column}", found, limits, f"write cls_{column}={row}, say")
        split = row // columns


def _shares(chain: Chain, cluster: Mapping[str, Count]) -> Count:
    """CTAs that make parts of one tile of the first product's result."""
    return cluster.get(chain.products[0].reduction, 1) * cluster.get(TERMS, 1)


def _refused(where: str, found: object, limit: str, instead: str) -> RefusedError:
    return refuse(PlanRefused, "cluster", where, found=found, limit=limit, instead=instead)
