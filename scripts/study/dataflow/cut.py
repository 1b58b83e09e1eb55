"""Chains of their own: products whose clusters have nothing in common.

An intermediate that all clusters read from L2 ties the products on its two sides together in no
other way, so that each side chooses its own schedule, tiles and cluster:

```
A B -> C -> E        one chain           one cluster shape for both products
A B -> C | C D -> E  cut after C         a shape for each; candidates multiply, and a search adds
```

A cut chain has as many candidates as all its parts multiplied, but the best of it is the best of
each part, so that a search through it looks at their sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import Chain, Tensor


def cuts(chain: Chain) -> Iterator[tuple[str, ...]]:
    """All ways to cut a chain: names of the intermediates to cut after, none of them first."""
    names = [each.name for each in chain.intermediates]
    for count in range(len(names) + 1):
        yield from combinations(names, count)


def cut(chain: Chain, after: Sequence[str]) -> tuple[Chain, ...]:
    """Cut a chain after some intermediates.

    Parameters
    ----------
    chain : Chain
        What is computed.
    after : Sequence[str]
        Names of intermediates; each is the output of one part and an input of the next.

    Returns
    -------
    tuple[Chain, ...]
        One more than there are names, in order.

    Raises
    ------
    PlanRefused
        For names that are no intermediates.
    """
    known = [each.name for each in chain.intermediates]
    odd = [each for each in after if each not in known]
    if odd:
        raise refuse(
            PlanRefused,
            "cut",
            "after",
            found=odd[0],
            limit="intermediates: " + (", ".join(known) or "there are none"),
            instead="name what a product makes and the next one reads",
        )
    ends = [index for index, name in enumerate(known) if name in after]
    starts = [0, *(each + 1 for each in ends)]
    stops = [*(each + 1 for each in ends), len(chain.products)]
    return tuple(_part(chain, *each) for each in zip(starts, stops, strict=True))


def _part(chain: Chain, start: int, stop: int) -> Chain:
    products = chain.products[start:stop]
    names = {name for each in products for name in (each.left, *each.rights, each.output)}
    tensors = tuple(
        _as_end(each, products[0].left, products[-1].output)
        for each in chain.tensors
        if each.name in names
    )
    used = {dim for each in tensors for dim in each.dims}
    return Chain(tuple(each for each in chain.dims if each.name in used), tensors, products)


def _as_end(tensor: Tensor, first: str, last: str) -> Tensor:
    if tensor.role == "intermediate" and tensor.name in (first, last):
        return replace(tensor, role="input" if tensor.name == first else "output")
    return tensor
