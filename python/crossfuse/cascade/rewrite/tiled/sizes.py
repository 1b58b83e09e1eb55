"""Extents of tiles: given by the caller, or chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from crossfuse.cascade.rewrite.tiled.refusal import refused

#: CTAs of a cluster; rows and columns of one product of a warpgroup.
MAX_CLUSTER = 16
WARPGROUP_ROWS, MAX_COLUMNS = 64, 256
#: What a pipelined product sums in a step: a row of a swizzled box of 16 bits an element.
DEPTH = 64


@dataclass(frozen=True)
class CascadeTiles:
    """How a cascade with products is divided. Zero means: choose.

    Attributes
    ----------
    rows : int
        Rows of a tile: 64 for each warpgroup that multiplies.
    elements : int
        Elements of the axis that a step takes in, such as keys.
    columns : int
        Columns of a tile of the result; all of them if there are few.
    depth : int
        What the product that makes the elements sums at a time; all of it if that fits into
        shared memory.
    stages : int
        Stages in shared memory; 0 for as many as fit.
    warpgroups : int
        Warpgroups that multiply.
    cluster : int
        CTAs that share the axis of one tile; their states merge through distributed shared memory.
    """

    rows: int = 0
    elements: int = 0
    columns: int = 0
    depth: int = 0
    stages: int = 0
    warpgroups: int = 0
    cluster: int = 1

    def complete(self, rows: int, length: int, columns: int, depth: int) -> CascadeTiles:
        """Fill in what the caller left open.

        Parameters
        ----------
        rows : int
            Rows that share what the columns are made of.
        length : int
            Elements of the axis.
        columns : int
            Columns of the widest result; 0 without one.
        depth : int
            What the product that makes the elements sums; 0 without one.

        Raises
        ------
        CascadeRefused
            For negative numbers, and clusters that cannot be.
        """
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 0:
                limit, instead = "0 (choose) or more", f"pass a positive {name}, or leave it out"
                raise refused(f"tiles, {name}", getattr(self, name), limit, instead)
        if not 1 <= self.cluster <= min(MAX_CLUSTER, length):
            limit = f"1 to {MAX_CLUSTER} CTAs, each with elements of {length}"
            raise refused("tiles, cluster", self.cluster, limit, "pass a smaller cluster")
        # Without a second product a tile takes in whole rows, where one wgmma makes them.
        whole = bool(depth) and not columns and length <= MAX_COLUMNS
        groups = self.warpgroups or (2 if rows > WARPGROUP_ROWS and not whole else 1)
        wide = 256 if columns > 512 else columns
        most = 64 if max(depth, wide) > 256 else 128
        deep = DEPTH if whole or depth > 640 else depth
        return replace(
            self,
            rows=self.rows or groups * WARPGROUP_ROWS,
            elements=self.elements or (-(-length // 8) * 8 if whole else most),
            columns=self.columns or wide,
            depth=self.depth or min(depth, deep),
            warpgroups=groups,
        )
