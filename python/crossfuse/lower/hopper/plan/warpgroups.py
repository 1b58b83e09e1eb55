"""How the rows of a tile are divided among the warpgroups that multiply."""

from __future__ import annotations

from dataclasses import dataclass

from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.boxes import WARPGROUP_ROWS


@dataclass(frozen=True)
class Warpgroups:
    """Warpgroups that multiply a tile.

    A wgmma has 64 rows. More than three warpgroups leave a thread 112 registers, so of larger
    tiles each warpgroup multiplies several blocks of 64 rows, one below the other.

    Attributes
    ----------
    count : int
        Warpgroups.
    blocks : int
        Blocks of 64 rows of each.
    """

    count: int
    blocks: int = 1

    @property
    def share(self) -> int:
        """Rows of one warpgroup."""
        return self.blocks * WARPGROUP_ROWS

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return self.count * self.share


#: By the rows of a tile: who multiplies it, and the sums that a thread may hold at most, which
#: leave room for addresses and the epilogue.
_DIVISIONS = {
    64: (Warpgroups(1), 128),
    128: (Warpgroups(2), 128),
    192: (Warpgroups(3), 96),
    256: (Warpgroups(2, 2), 192),
}


def share_rows(program: TileProgram) -> Warpgroups:
    """Divide the rows of a program's tiles.

    Raises
    ------
    LoweringRefused
        If there is no such division, or registers do not hold the sums.
    """
    contraction = program.contraction
    rows, columns = contraction.rows, contraction.columns
    warpgroups, sums = _DIVISIONS.get(rows, (Warpgroups(0), 0))
    most = 2 * sums // (warpgroups.blocks * len(contraction.products))
    if columns % 8 or columns > most:
        raise refuse(
            "tile-shape",
            f"product of '{contraction.products[0].accumulator.name}'",
            found=f"a tile of {rows} x {columns}",
            limit="64 or 128 rows with columns in multiples of 8 up to 256, or 192 or 256 rows "
            "with up to 192 columns; all products of a tile together",
            instead="split rows and columns by other factors",
        )
    if warpgroups.blocks > 1:
        _check_blocks(program, warpgroups)
    return warpgroups


def _check_blocks(program: TileProgram, warpgroups: Warpgroups) -> None:
    """Refuse what only warpgroups of one block do."""
    exchange = program.exchange
    others = {
        "a product of each of two paired CTAs": exchange is not None and exchange.pair,
        "an intermediate that a cluster gathers": program.gives or program.takes,
        "an intermediate in registers": program.keeps or program.reuses,
    }
    for what, is_wanted in others.items():
        if is_wanted:
            raise refuse(
                "tile-shape",
                f"product of '{program.contraction.products[0].accumulator.name}'",
                found=f"{what}, in tiles of {warpgroups.rows} rows",
                limit=f"{warpgroups.rows // 2} rows: no warpgroup has several blocks of "
                f"{WARPGROUP_ROWS} rows there",
                instead=f"split rows by {warpgroups.rows // 2}, or keep the intermediate in L2 "
                "(grid_stage)",
            )
