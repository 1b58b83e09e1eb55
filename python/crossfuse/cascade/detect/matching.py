"""Which variables of one reader are which of another: equal accesses to one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.cascade.detect.loads import moved, same, variables_of

#: What each variable of a reader is, in the group's variables.
Binding = Mapping[Any, Any]
#: An index in the group's variables, and one that is to be equal in the reader's.
Pair = tuple[Any, Any]
#: Extents by variable.
Extents = Mapping[Any, int]


def extended(
    binding: Binding, pairs: Iterable[Pair], own: Extents, group: Extents
) -> dict[Any, Any] | None:
    """Extend a binding so that indices become equal.

    Parameters
    ----------
    binding : Mapping
        What is known.
    pairs : Iterable[tuple]
        Indices that are to be equal.
    own, group : Mapping[Var, int]
        Variables of the reader and of the group, with their extents.

    Returns
    -------
    dict | None
        The binding: together, the reader's variables go once through all that the group's variables
        in them go through. None if the indices cannot become equal so.
    """
    found, later = dict(binding), []
    for there, here in pairs:
        if here in own and own[here] > 1 and here not in found:
            found[here] = there
        else:
            later.append((there, here))
    for choice in _choices(found, later, own, group):
        if all(_equal(there, here, choice, own, group) for there, here in later):
            single = _single(choice, later, own, group)
            if is_bijection(choice, own, group):
                return choice | single
    return None


def is_bijection(binding: Binding, own: Extents, group: Extents) -> bool:
    """Whether bound variables of a reader count each iteration of the group's once."""
    bound = {var: own[var] for var in binding if own.get(var, 1) > 1}
    values = [binding[var] for var in bound]
    used = variables_of(values)
    domain = {var: extent for var, extent in group.items() if var in used}
    known = access.analyzer(domain)
    for value, extent in zip(values, bound.values(), strict=True):
        reach = known.const_int_bound(value)
        if int(reach.min_value) < 0 or int(reach.max_value) >= extent:
            return False
    return not bound or access.inverse(values, bound, domain) is not None


def _equal(there: Any, here: Any, binding: Binding, own: Extents, group: Extents) -> bool:
    """Whether indices are equal; variables of one iteration are 0."""
    every = {**own, **group}
    return same(access.simplified([there], group), access.replaced([here], binding, every))


def _single(found: Binding, later: Sequence[Pair], own: Extents, group: Extents) -> dict[Any, Any]:
    """Variables of one iteration that stand at the same place: they may as well be one."""
    taken = variables_of(found.values())
    return {
        here: there
        for there, here in later
        if own.get(here) == 1 and group.get(there) == 1 and not {there} & taken
    }


def _choices(
    found: dict[Any, Any], later: Sequence[Pair], own: Extents, group: Extents
) -> Iterator[dict[Any, Any]]:
    """Ways to bind variables that occur only inside of indices, such as ``l // 4``."""
    wanted = variables_of(here for _, here in later) & set(own) - set(found)
    free = [var for var in own if var in wanted and own[var] > 1]
    if not free:
        yield found
        return
    solved = _solved(free, later, own, group)
    if solved is not None:
        yield found | solved
    there = variables_of(there for there, _ in later) - variables_of(found.values())
    images = [var for var in group if var in there and group[var] > 1]
    for order in permutations(images, len(free)):
        if all(own[var] == group[image] for var, image in zip(free, order, strict=True)):
            yield found | dict(zip(free, order, strict=True))


def _solved(
    free: Sequence[Any], later: Sequence[Pair], own: Extents, group: Extents
) -> dict[Any, Any] | None:
    """Variables from indices that have all of them: a row that is made of a batch and a head."""
    pairs = [(there, here) for there, here in later if variables_of([here]) & set(free)]
    if len(pairs) == len(free) == 1:
        # The same loop, but shifted or turned: such elements are of another row.
        return None
    names = [ir.Var(f"c{place}", str(there.ty)) for place, (there, _) in enumerate(pairs)]
    known = access.analyzer(group)
    extents = {
        name: int(known.const_int_bound(there).max_value) + 1
        for name, (there, _) in zip(names, pairs, strict=True)
    }
    indices = [here for _, here in pairs]
    if variables_of(indices) - set(free) or not all(map(access.is_affine, indices)):
        return None
    values = access.inverse(indices, extents, {var: own[var] for var in free})
    if values is None:
        return None
    places = dict(zip(names, (there for there, _ in pairs), strict=True))
    return dict(zip(free, moved([values[var] for var in free], places, group), strict=True))
