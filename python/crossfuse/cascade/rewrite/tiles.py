"""Sizes of the two forms: a stream of threads, and a stream over tiles of matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from crossfuse.calls import checked
from crossfuse.errors import CascadeRefused, RefusedError, refuse
from crossfuse.hardware import WARPGROUP_ROWS, Device
from crossfuse.markers import MAX_CLUSTER
from crossfuse.schema import Count, Tile


def refused(
    where: str, found: object, limit: str, instead: str, form: str = "stream"
) -> RefusedError:
    """Build the refusal of a rewriting; see `crossfuse.errors.Refusal`."""
    rule = f"cascade-{form}"
    return refuse(CascadeRefused, rule, where, found=found, limit=limit, instead=instead)


#: The same of the form of tiles.
tiles_refused = partial(refused, form="tiles")

# A stream of threads.

MAX_THREADS = Device("").max_threads
#: Where elements stay for outputs over the axis.
RESIDENCES = ("registers", "shared", "none")


@checked
@dataclass(frozen=True)
class StreamTiles:
    """Sizes of a stream."""

    #: Threads of a CTA that share one row: a power of two, 1 to 1024.
    threads: Tile = 256
    #: Elements of a thread side by side; 0: as many as one load of 16 bytes takes of the narrowest
    #: element that is streamed.
    vector: Tile = 0
    #: Vectors of a thread that one step of the stream takes in.
    unroll: Tile = 4
    #: CTAs that share one row, 1 to 16; their states merge through distributed shared memory.
    cluster: Tile = 1
    #: Rows of a CTA, side by side; a divisor of the number of rows.
    rows: Tile = 1
    #: Where elements stay until outputs over the axis are computed: ``"registers"``, ``"shared"``,
    #: or ``"none"``, which loads them again.
    resident: str = "none"
    #: Least number of CTAs that a multiprocessor is to hold, 0 for as many as registers allow; more
    #: make the compiler use fewer registers.
    ctas: Count = 0

    def check(self, rows: int) -> None:
        """Refuse sizes that no kernel of a cascade of some rows can have."""
        sizes = {name: getattr(self, name) for name in ("threads", "unroll", "cluster", "rows")}
        for name, size in sizes.items():
            if size < 1:
                raise refused(f"tiles, {name}", size, "1 or more", f"pass a positive {name}")
        if self.threads & (self.threads - 1) or self.threads * self.rows > MAX_THREADS:
            raise refused(
                "tiles, threads",
                f"{self.threads} threads for each of {self.rows} rows",
                f"a power of two, {MAX_THREADS} in a CTA at most",
                "pass fewer threads or fewer rows",
            )
        if self.cluster > MAX_CLUSTER or (self.cluster > 1 and self.rows > 1):
            raise refused(
                "tiles, cluster",
                f"{self.cluster} CTAs for {self.rows} rows",
                f"{MAX_CLUSTER} CTAs, and one row where there are several",
                f"pass cluster=1, or rows=1 and at most {MAX_CLUSTER} CTAs",
            )
        if rows % self.rows:
            raise refused(
                "tiles, rows",
                f"{self.rows} rows of a CTA, of {rows}",
                "a divisor of the number of rows",
                "pass rows=1",
            )
        if self.resident not in RESIDENCES:
            limit = ", ".join(RESIDENCES)
            raise refused("tiles, resident", repr(self.resident), limit, "pass one of these")


@checked
@dataclass(frozen=True)
class SummingTiles:
    """Sizes of a stream that adds rows up: a CTA has one row after another.

    Its elements stay in shared memory: registers hold sums of all columns of a thread.
    """

    #: As of `StreamTiles`; a row has one CTA, and a thread the same elements of all rows.
    threads: Tile = 512
    unroll: Tile = 2
    ctas: Count = 0
    #: CTAs, each of as many rows; a divisor of the number of rows.
    groups: Tile = 1

    @property
    def stream(self) -> StreamTiles:
        """Sizes of the stream of a row."""
        return StreamTiles(self.threads, 0, self.unroll, 1, 1, "shared", self.ctas)

    def check(self, rows: int) -> None:
        """Refuse sizes that no kernel of some rows can have."""
        self.stream.check(rows)
        if rows % self.groups:
            raise refused(
                "tiles, groups",
                f"{self.groups} groups of {rows} rows",
                "a divisor of the number of rows",
                "pass groups=1",
            )


# A stream over tiles.

#: Most columns that one warpgroup accumulates for its rows.
WIDE = 256
#: Most elements in a row of a left operand that stays in shared memory.
RESIDENT = 640
#: Depth of a step of a pipelined product: a row of a swizzled box of 16 bits an element.
DEPTH = 64
#: Columns of a block of a warpgroup's registers.
_BLOCK = 8
#: Where the states of CTAs that share an axis merge.
DSM, KERNEL = "dsm", "kernel"
MERGES = (DSM, KERNEL)


@checked
@dataclass(frozen=True)
class CascadeTiles:
    """How a cascade with products is divided. Zero means: choose."""

    #: Rows of a tile: 64 for each warpgroup that multiplies, or 8 or 16 that warps multiply by
    #: themselves.
    rows: Tile = 0
    #: Elements of the axis that a step takes in, such as keys.
    elements: Tile = 0
    #: Columns of a tile of the result; all of them if there are few.
    columns: Tile = 0
    #: Depth that the product that makes the elements sums at a time; all of it if it fits into
    #: shared memory and other products follow, or the axis has several tiles.
    depth: Tile = 0
    #: Stages in shared memory; 0 for as many as fit.
    stages: Tile = 0
    #: Warpgroups that multiply.
    warpgroups: Tile = 0
    #: CTAs that share the axis of one tile; their states merge.
    cluster: Tile = 1
    #: CTAs of a cluster with tiles of rows side by side: operands that all rows share are loaded
    #: once for them.
    share: Tile = 1
    #: How CTAs that share an axis merge their states: ``"dsm"``, they are a cluster and merge
    #: through distributed shared memory; ``"kernel"``, they store states in global memory, and a
    #: second kernel merges them.
    merge: str = DSM

    @property
    def in_memory(self) -> bool:
        """Whether states pass from one kernel to a second one."""
        return self.cluster > 1 and self.merge == KERNEL

    @property
    def ctas_of_cluster(self) -> int:
        """CTAs that are launched together: those that share an axis, or have rows side by side."""
        return self.share if self.in_memory else self.cluster * self.share

    @property
    def alone(self) -> int:
        """CTAs of a tile of rows that start one by one; those of a cluster start together."""
        return self.cluster if self.in_memory else 1

    def complete(self, rows: int, length: int, columns: int, depth: int) -> CascadeTiles:
        """Choose the sizes that the caller left open; impossible clusters and merges are refused.

        `rows` share their right operands, `length` is of the axis; without a result with columns,
        or a product that makes elements, `columns` and `depth` are 0.
        """
        if self.merge not in MERGES:
            instead = "name one of these, or leave it out"
            raise tiles_refused("tiles, merge", repr(self.merge), " or ".join(MERGES), instead)
        if not 1 <= self.cluster <= MAX_CLUSTER:
            limit = f"1 to {MAX_CLUSTER} CTAs"
            raise tiles_refused("tiles, cluster", self.cluster, limit, "pass a smaller cluster")
        # Without a second product a tile takes in whole rows, where one wgmma makes them.
        whole = bool(depth) and not columns and length <= WIDE
        many = rows > WARPGROUP_ROWS and columns <= WIDE and not whole
        groups = self.warpgroups or (2 if many else 1)
        wide = WIDE if columns > 2 * WIDE else columns
        some = DEPTH if depth > RESIDENT else depth
        deep = self.depth or (DEPTH if whole else some)
        most = 64 if depth == 0 or max(deep, wide) > WIDE else 128
        size = self.rows or groups * WARPGROUP_ROWS
        self._check_share(-(-rows // size))
        return replace(
            self,
            rows=size,
            elements=self.elements or (-(-length // 8) * 8 if whole else most),
            columns=self.columns or wide,
            depth=deep,
            warpgroups=groups,
        )

    def makes_whole_rows(self, length: int) -> bool:
        """Whether one pipelined product makes whole rows, and nothing is multiplied after it.

        The tiles are complete, and the length is of the axis.
        """
        return not self.columns and self.elements >= length

    def slice_of(self, columns: int) -> int:
        """Columns that a CTA of a cluster merges; the last CTAs may have fewer, or none.

        Threads send pairs, and know whom a pair belongs to if slices are whole blocks of registers.
        """
        found = -(-columns // self.cluster)
        even = found * self.cluster == columns and found % 2 == 0
        return found if even else -(-found // _BLOCK) * _BLOCK

    def _check_share(self, tiles: int) -> None:
        """Refuse clusters of CTAs side by side that do not have a tile of rows for each."""
        if self.share == 1:
            return
        alone = self.cluster == 1 and 1 < self.share <= MAX_CLUSTER
        if not alone or tiles % self.share:
            limit = (
                f"a divisor of the {tiles} tiles of rows up to {MAX_CLUSTER}, or 1 beside a cluster"
            )
            raise tiles_refused("tiles, share", self.share, limit, "pass a divisor, or share=1")


def arrays_of(steps: Sequence[tuple[int | None, frozenset[int]]]) -> dict[int, int]:
    """Find the array of registers of each tile: it takes the place of one that nobody reads later.

    Tiles are numbers, scores are tile 0 in array 0. A step makes a tile, or none, and reads some.
    """
    arrays = {0: 0}
    for number, (made, _) in enumerate(steps):
        if made is None or made in arrays:
            continue
        needed = {arrays[e] for _, reads in steps[number + 1 :] for e in reads if e in arrays}
        arrays[made] = next(n for n in range(len(arrays) + 1) if n not in needed)
    return arrays
