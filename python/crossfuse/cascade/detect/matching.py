"""Which variables of one reader are which of another: equal accesses to one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import permutations
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.detect.loads import moved, same, variables_of

#: The site's variable that each variable of a reader is.
Binding = Mapping[Any, Any]
#: An index in the site's variables, and one that is to be equal in the reader's.
Pair = tuple[Any, Any]


def extended(
    binding: Binding,
    pairs: Iterable[Pair],
    own: Mapping[Any, int],
    site: Mapping[Any, int],
) -> dict[Any, Any] | None:
    """Extend a binding so that indices become equal.

    Parameters
    ----------
    binding : Mapping
        What is known.
    pairs : Iterable[tuple]
        Indices that are to be equal.
    own, site : Mapping[Var, int]
        Variables of the reader and of the site, with their extents.

    Returns
    -------
    dict | None
        The binding, one variable of the site for one of the reader, of equal extent; None if the
        indices cannot become equal.
    """
    found, later = dict(binding), []
    for there, here in pairs:
        if here in own and own[here] > 1:
            if not _bind(found, here, there, own, site):
                return None
        else:
            later.append((there, here))
    for choice in _choices(found, later, own, site):
        if all(
            same([there], moved([here], choice)) or _ones(there, here, own, site)
            for there, here in later
        ):
            return choice | _single(choice, later, own, site)
    return None


def _single(
    found: Binding, later: list[Pair], own: Mapping[Any, int], site: Mapping[Any, int]
) -> dict[Any, Any]:
    """Variables of one iteration that stand at the same place: they may as well be one."""
    pairs = {here: there for there, here in later if here in own and here not in found}
    taken = set(found.values())
    return {here: there for here, there in pairs.items() if there in site and there not in taken}


def _bind(
    found: dict[Any, Any], here: Any, there: Any, own: Mapping[Any, int], site: Mapping[Any, int]
) -> bool:
    if here in found:
        return bool(same([found[here]], [there]))
    if there not in site or site[there] != own[here] or there in found.values():
        return False
    found[here] = there
    return True


def _ones(there: Any, here: Any, own: Mapping[Any, int], site: Mapping[Any, int]) -> bool:
    """Whether both indices are always 0: constants, and variables of one iteration."""
    return all(
        ir.constant(index) == 0 or extents.get(index) == 1
        for index, extents in ((there, site), (here, own))
    )


def _choices(
    found: dict[Any, Any], later: list[Pair], own: Mapping[Any, int], site: Mapping[Any, int]
) -> Iterator[dict[Any, Any]]:
    """Ways to bind variables that occur only inside of indices, such as ``l // 4``."""
    wanted = variables_of(here for _, here in later) & set(own) - set(found)
    free = [var for var in own if var in wanted and own[var] > 1]
    there = variables_of(there for there, _ in later) - set(found.values())
    images = [var for var in site if var in there and site[var] > 1]
    for order in permutations(images, len(free)):
        if all(own[var] == site[image] for var, image in zip(free, order, strict=True)):
            yield found | dict(zip(free, order, strict=True))
