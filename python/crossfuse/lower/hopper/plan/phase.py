"""One phase of a kernel: a tile program, with how its tiles are loaded, multiplied and stored."""

from __future__ import annotations

from dataclasses import dataclass

from crossfuse.lower.hopper.multiply.instruction import OPERAND_TYPES
from crossfuse.lower.hopper.plan.gathered import check_depth, check_gather
from crossfuse.lower.hopper.plan.kept import check_kept, check_room, kept_registers
from crossfuse.lower.hopper.plan.operand import Operand, make_operand
from crossfuse.lower.hopper.plan.store import StorePlan, plan_store
from crossfuse.lower.hopper.plan.warpgroups import Warpgroups, share_rows
from crossfuse.lower.hopper.program.tile_program import Product, TileProgram
from crossfuse.lower.hopper.reduced.room import check_reduced
from crossfuse.lower.hopper.rows.chunk_plan import ChunkPlan, plan_chunks
from crossfuse.lower.hopper.sync.flags import Flags
from crossfuse.lower.image import TensorMap
from crossfuse.lower.refusal import refuse

#: Rows of a warpgroup's tile that each of its warps holds.
WARP_ROWS = 16
#: Columns of a wgmma at most.
_MAX_COLUMNS = 256


@dataclass(frozen=True)
class PhasePlan:
    """Decisions about one tile program.

    Attributes
    ----------
    program : TileProgram
        What it computes.
    left : Operand | None
        How the left tile is loaded; None if it is there: gathered by the cluster in shared memory,
        or kept in registers.
    rights : tuple[Operand, ...]
        How each product's right tile is loaded.
    store : StorePlan
        How the result is stored.
    warpgroups : Warpgroups
        Those that multiply.
    tails : tuple[bool, bool]
        Whether tiles of the output reach beyond its rows, and beyond its columns.
    raises : Flags | None
        What tells other CTAs that a tile is stored, if they load it in a later phase.
    awaits : Flags | None
        Flags of the tiles that make up the left operand, if an earlier phase stores it.
    others : tuple[Operand, ...]
        What the second CTA of a pair loads in place of `rights`; none without pairs.
    chunks : ChunkPlan | None
        If rows of the left operand are made chunk by chunk.
    """

    program: TileProgram
    left: Operand | None
    rights: tuple[Operand, ...]
    store: StorePlan
    warpgroups: Warpgroups
    tails: tuple[bool, bool]
    raises: Flags | None = None
    awaits: Flags | None = None
    others: tuple[Operand, ...] = ()
    chunks: ChunkPlan | None = None

    @property
    def columns(self) -> int:
        """Columns of the tile: N of the wgmma."""
        return self.program.contraction.columns

    @property
    def accumulators(self) -> int:
        """Float32 registers of one product's tile in a thread."""
        return self.columns // 2

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.warpgroups.count

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows that each of them multiplies, one below the other."""
        return self.warpgroups.blocks

    @property
    def sums(self) -> int:
        """Float32 registers of a thread that hold its part of all products' tiles."""
        return self.blocks * len(self.rights) * self.accumulators

    @property
    def is_one_product(self) -> bool:
        """Whether one wgmma multiplies by the right tiles of all products.

        Those stored as [n, k] lie in a stage as if they were one tile, and so do the sums. The left
        tile is read once then. With one block of rows, products are apart: so they were measured.
        """
        alike = len({(each.k_major, each.tile.dtype) for each in self.rights}) == 1
        fits = self.columns * len(self.rights) <= _MAX_COLUMNS
        return self.blocks > 1 and alike and self.rights[0].k_major and fits

    def first_sum(self, block: int, product: int) -> int:
        """The first register of a block's sums of a product: blocks one behind the other."""
        return (block * len(self.rights) + product) * self.accumulators

    @property
    def kept(self) -> int:
        """Registers of a thread that hold the left operand, if the phase before has kept it."""
        contraction = self.program.contraction
        columns = contraction.steps * contraction.depth
        return kept_registers(columns) if self.program.reuses else 0

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Everything that is loaded."""
        return (*self.lefts, *self.rights, *self.others)

    @property
    def lefts(self) -> tuple[Operand, ...]:
        """The left operand, if it is loaded."""
        return () if self.left is None else (self.left,)

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        """Descriptors of its loads and of its store."""
        chunks = () if self.chunks is None else (self.chunks.source, self.chunks.factors)
        return (*(each.map for each in self.operands), *self.store.maps, *chunks)

    @property
    def slice_bytes(self) -> int:
        """Bytes of the partial sums that one CTA sends to another; 0 without an exchange."""
        exchange = self.program.exchange
        if exchange is None:
            return 0
        if self.has_whole_warps:
            return exchange.rows * self.columns * 4
        return exchange.elements * 4

    @property
    def has_whole_warps(self) -> bool:
        """Whether each slice of a split reduction is the rows of whole warps of a full tile."""
        exchange = self.program.exchange
        assert exchange is not None
        rows = exchange.rows * exchange.place.extent
        full = rows == self.warpgroups.rows and exchange.width == self.columns
        return full and exchange.rows % WARP_ROWS == 0


def plan_phase(program: TileProgram, awaits: Flags | None = None) -> PhasePlan:
    """Plan a phase.

    Parameters
    ----------
    program : TileProgram
        From `recover`.
    awaits : Flags | None
        What an earlier phase raises for its left operand.

    Returns
    -------
    PhasePlan
        For `plan_kernel`.

    Raises
    ------
    LoweringRefused
        If tensor cores or TMA cannot take the tiles.
    """
    contraction = program.contraction
    for product in contraction.products:
        for each in product.both:
            _check_types(contraction.left.dtype, each)
    warpgroups = share_rows(program)
    if program.reduced is not None:
        check_reduced(program.reduced, warpgroups)
    if program.exchange is not None:
        _check_slices(program)
    if program.gives is not None:
        check_gather(program.gives, program.store.tile.dtype)
    if program.takes is not None:
        check_depth(program.takes, contraction.depth)
    if program.keeps:
        check_kept(program.store.tile)
    if program.reuses:
        check_room(contraction, warpgroups.count)
    at_hand = program.takes or program.reuses
    left = None if at_hand else make_operand(program, contraction.left, k_major=True)
    rights, others = (
        tuple(_right(program, each) for each in group)
        for group in (
            contraction.products,
            [each.instead for each in contraction.products if each.instead is not None],
        )
    )
    if program.takes is not None and program.takes.ring:
        _check_own(rights)
    return PhasePlan(
        program,
        left,
        rights,
        plan_store(program, warpgroups.blocks),
        warpgroups,
        (program.has_tail(0), program.has_tail(1)),
        Flags.of(program, warpgroups.count) if program.staged else None,
        awaits,
        others,
        plan_chunks(program),
    )


def _right(program: TileProgram, product: Product) -> Operand:
    """How a product's right tile is loaded; CTAs of a pair load different ones."""
    exchange = program.exchange
    apart = exchange.place if exchange is not None and exchange.pair else None
    return make_operand(program, product.right, k_major=not product.is_transposed, apart=apart)


def _check_own(rights: tuple[Operand, ...]) -> None:
    """CTAs that take slices in orders of their own load their own right tiles."""
    for operand in rights:
        if operand.sharers > 1:
            raise refuse(
                "tile-gather",
                f"tensor '{operand.tile.buffer.name}'",
                found=f"tiles that {operand.sharers} CTAs share, taken in ring order",
                limit="right tiles of each CTA alone: each takes slices in an order of its own",
                instead="bind columns of the output to the cluster, or call "
                "dsm_shuffle(..., ring=False)",
            )


def _check_slices(program: TileProgram) -> None:
    exchange = program.exchange
    assert exchange is not None
    if exchange.elements % 2 or exchange.width % 2:
        raise refuse(
            "tile-exchange",
            f"axis {exchange.place.tag}",
            found=f"slices of {exchange.elements} elements of rows of {exchange.width}",
            limit="even numbers: registers hold pairs of a row",
            instead="split the reduction over fewer CTAs, or take another tile",
        )


def _check_types(left: str, product: Product) -> None:
    right = product.right.dtype
    if left not in OPERAND_TYPES or OPERAND_TYPES[left][1] != OPERAND_TYPES.get(right, ("", 0))[1]:
        raise refuse(
            "tile-operand",
            f"product of '{product.accumulator.name}'",
            found=f"operands of {left} and {right}",
            limit=f"two of {', '.join(OPERAND_TYPES)} of one width",
            instead="convert the operands, or leave the stages out for the general lowering",
        )
    if left != right and "float8" not in left:
        raise refuse(
            "tile-operand",
            f"product of '{product.accumulator.name}'",
            found=f"operands of {left} and {right}",
            limit="operands of one 16-bit type",
            instead="convert one of them",
        )
