"""A walk through the CTAs of a cluster that counts who needs which element from whom.

Sets of elements instead of formulas: `exchange` must say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from study.dataflow.cluster import Lanes

Element = tuple[int, ...]


@dataclass
class Wires:
    """Bytes that went from CTA to CTA.

    Attributes
    ----------
    leaving, arriving : Counter[int]
        By CTA.
    """

    leaving: Counter[int] = field(default_factory=Counter)
    arriving: Counter[int] = field(default_factory=Counter)

    def send(self, source: int, target: int, size: int) -> None:
        """Count bytes on their way; a CTA's own need none."""
        if source != target:
            self.leaving[source] += size
            self.arriving[target] += size

    @property
    def total(self) -> int:
        """All bytes."""
        return self.leaving.total()


def slices(elements: Sequence[Element], count: int) -> list[list[Element]]:
    """Cut a tile into slices that differ by one element at most."""
    return [list(elements[each::count]) for each in range(count)]


def scatter(wires: Wires, group: Sequence[int], tile: Sequence[Element], size: int) -> None:
    """Each CTA of a group gets its slice of everybody's partial tile."""
    for owner, part in zip(group, slices(tile, len(group)), strict=True):
        for source in group:
            wires.send(source, owner, len(part) * size)


def gather(
    wires: Wires, has: dict[int, set[Element]], needs: dict[int, set[Element]], size: int
) -> None:
    """Each CTA gets each element that it lacks, once, from one that has it."""
    for target, needed in needs.items():
        for element in needed - has[target]:
            source = next(cta for cta, present in has.items() if element in present)
            wires.send(source, target, size)


def all_exchanged(
    group: Sequence[int], tile: Sequence[Element], item: int, accumulator: int, method: str
) -> Wires:
    """Let a group combine its partial tiles until all have the result."""
    wires = Wires()
    if method == "naive":
        for source in group:
            for target in group:
                wires.send(source, target, len(tile) * accumulator)
        return wires
    scatter(wires, group, tile, accumulator)
    has = {cta: set(part) for cta, part in zip(group, slices(tile, len(group)), strict=True)}
    gather(wires, has, {cta: set(tile) for cta in group}, item)
    return wires


def columns_of(row: int, before: Lanes, after: Lanes) -> dict[int, tuple[int, int, int, int]]:
    """Say for each CTA of a row what it is in two products that follow each other.

    Parameters
    ----------
    row : int
        CTAs.
    before, after : Lanes
        How the products divide them.

    Returns
    -------
    dict[int, tuple[int, int, int, int]]
        By CTA: column and share in the first, column and share in the second.
    """
    places = {}
    for cta in range(row):
        column, share = divmod(cta, int(before.split))
        place = (column % int(after.shuffle)) * int(before.split) + share
        places[cta] = (column, share, place, column // int(after.shuffle))
    return places


def shuffled(
    row: int, before: Lanes, after: Lanes, tiles: Sequence[Iterable[Element]], item: int
) -> Wires:
    """Let the CTAs of a row get the tiles of their share of the next sum, within their groups.

    Parameters
    ----------
    row : int
        CTAs.
    before, after : Lanes
        How the product that made the tiles and the one that reads them divide the CTAs.
    tiles : Sequence[Iterable[Element]]
        Elements of the tile of each column; CTAs of all shares of a column have it whole.
    item : int
        Bytes of an element.

    Returns
    -------
    Wires
        What went.
    """
    wires, places = Wires(), columns_of(row, before, after)
    made = [set(each) for each in tiles]
    for share_before in range(int(before.split)):
        for share_after in range(int(after.split)):
            group = [
                cta
                for cta, (_, share, _, part) in places.items()
                if share == share_before and part == share_after
            ]
            wanted = [
                each for each in range(len(made)) if each // int(after.shuffle) == share_after
            ]
            needed = set().union(*(made[each] for each in wanted))
            has = {cta: made[places[cta][0]] for cta in group}
            gather(wires, has, dict.fromkeys(group, needed), item)
    return wires
