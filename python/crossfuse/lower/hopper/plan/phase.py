"""Plans one phase of a kernel: how the tiles of a program are loaded, multiplied and stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from crossfuse.hardware import WARPGROUP_ROWS
from crossfuse.lower.hopper.flags import Flags
from crossfuse.lower.hopper.plan.tiles import (
    Operand,
    StorePlan,
    check_depth,
    check_gather,
    check_kept,
    check_kept_room,
    kept_registers,
    make_operand,
    plan_store,
)
from crossfuse.lower.hopper.program.tile_program import Product, TileProgram
from crossfuse.lower.hopper.rows.plan import (
    ChunkPlan,
    check_row_room,
    plan_chunks,
    registers_beside,
)
from crossfuse.lower.hopper.stream.program import RowReductions, StreamProgram, starts_on_tiles
from crossfuse.lower.hopper.wgmma import OPERAND_TYPES
from crossfuse.lower.image import TensorMap
from crossfuse.lower.refusal import Rule, refuse
from crossfuse.planner.kernels.phase import blocks_of, warpgroups_of, widest

if TYPE_CHECKING:
    from crossfuse.lower.hopper.rows.program import RowProgram

_tile_shape_refused = Rule("tile-shape")
_grid_stage_refused = Rule("grid-stage")


def share_rows(program: TileProgram) -> tuple[int, int]:
    """Warpgroups that multiply, and blocks of 64 rows (a wgmma) of each, for a program's tiles.

    Refused if registers would not hold the sums.
    """
    contraction = program.contraction
    rows, columns = contraction.rows, contraction.columns
    count, blocks = int(warpgroups_of(rows)), int(blocks_of(rows))
    most = widest(rows, len(contraction.products))
    if rows != count * blocks * WARPGROUP_ROWS or columns % 8 or columns > most:
        raise _tile_shape_refused(
            f"product of '{contraction.products[0].accumulator.name}'",
            found=f"a tile of {rows} x {columns}",
            limit="64 or 128 rows with columns in multiples of 8 up to 256, or 192 or 256 rows "
            "with up to 192 columns; all products of a tile together",
            instead="split rows and columns by other factors",
        )
    if blocks > 1:
        _check_blocks(program)
    return count, blocks


def _check_blocks(program: TileProgram) -> None:
    """Refuse programs that need warpgroups of one block each."""
    others = {
        "an intermediate that a cluster gathers": program.gives or program.takes,
        "an intermediate in registers": program.keeps or program.reuses,
    }
    rows = program.contraction.rows
    for what, is_wanted in others.items():
        if is_wanted:
            raise _tile_shape_refused(
                f"product of '{program.contraction.products[0].accumulator.name}'",
                found=f"{what}, in tiles of {rows} rows",
                limit=f"{rows // 2} rows: no warpgroup has several blocks of "
                f"{WARPGROUP_ROWS} rows there",
                instead=f"split rows by {rows // 2}, or keep the intermediate in L2 (grid_stage)",
            )


#: Warpgroups that multiply at most: threads of more have 160 registers, or sums of several blocks.
_WARPGROUPS = 2


def check_reduced(reduced: RowReductions, count: int, blocks: int) -> None:
    """Refuse tiles whose sums leave no registers for the elements selected from their rows."""
    if count > _WARPGROUPS or blocks > 1:
        raise _tile_shape_refused(
            f"product of '{reduced.scores.name}'",
            found=f"tiles of {reduced.tile[0]} rows, which are reduced in registers",
            limit="64 or 128 rows: other warpgroups have no registers left beside the sums",
            instead="split rows by 64",
        )


#: Rows of a warpgroup's tile that each of its warps holds.
WARP_ROWS = 16
#: Most columns of a wgmma.
_MAX_COLUMNS = 256


#: Registers a thread by the number of multiplying warpgroups: of the loading one, and of the
#: others; 0 leaves them as launched. Together at most 64 Ki a CTA.
REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}


@dataclass(frozen=True)
class PhasePlan:
    """All decisions about one tile program."""

    program: TileProgram
    #: None if the left tile is there already: gathered by the cluster in shared memory, or held in
    #: registers.
    left: Operand | None
    #: One for each product.
    rights: tuple[Operand, ...]
    store: StorePlan
    #: Warpgroups that multiply, and blocks of 64 rows that each multiplies, one below the other.
    consumers: int
    blocks: int
    #: Whether tiles of the output reach beyond its rows, and beyond its columns.
    tails: tuple[bool, bool]
    #: Flags of the tiles that it stores, if other CTAs load them in a later phase.
    raises: Flags | None = None
    #: Flags of the tiles that make up the left operand, if an earlier phase stores it.
    awaits: Flags | None = None
    #: If rows of the left operand are made chunk by chunk.
    chunks: ChunkPlan | None = None
    #: Registers of a thread that loads, and of one that multiplies; 0 as launched.
    registers: tuple[int, int] = (0, 0)
    #: The cluster that makes the first tile: of phases that need nothing of each other, the one
    #: behind that of the last tile before it.
    first: int = 0

    @property
    def columns(self) -> int:
        """Columns of the tile: N of the wgmma."""
        return self.program.contraction.columns

    @property
    def accumulators(self) -> int:
        """Float32 registers of one product's tile in a thread."""
        return self.columns // 2

    @property
    def share(self) -> int:
        """Rows of one warpgroup."""
        return self.blocks * WARPGROUP_ROWS

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return self.consumers * self.share

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
        """Registers of a thread that hold the left operand, if the preceding phase made it."""
        contraction = self.program.contraction
        columns = contraction.steps * contraction.depth
        return kept_registers(columns) if self.program.reuses else 0

    @property
    def operands(self) -> tuple[Operand, ...]:
        """All operands that are loaded."""
        return (*self.lefts, *self.rights)

    @property
    def lefts(self) -> tuple[Operand, ...]:
        """The left operand, if it is loaded."""
        return () if self.left is None else (self.left,)

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        """Descriptors of its loads and of its store."""
        return (*(each.map for each in self.operands), *self.store.maps)

    @property
    def slice_bytes(self) -> int:
        """Bytes of the partial sums that one CTA sends to another."""
        exchange = self.program.exchange
        assert exchange is not None
        if self.has_whole_warps:
            return exchange.rows * self.columns * 4
        return exchange.elements * 4

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of those that all CTAs send to one of them."""
        exchange = self.program.exchange
        assert exchange is not None
        return exchange.place.extent * self.slice_bytes

    @property
    def has_whole_warps(self) -> bool:
        """Whether each slice of a split reduction is the rows of whole warps of a full tile."""
        exchange = self.program.exchange
        assert exchange is not None
        rows = exchange.rows * exchange.place.extent
        full = rows == self.rows and exchange.width == self.columns
        return full and exchange.rows % WARP_ROWS == 0


def plan_phase(
    program: TileProgram,
    awaits: Flags | None = None,
    chunks: ChunkPlan | None = None,
    registers: dict[int, tuple[int, int]] = REGISTERS,
) -> PhasePlan:
    """Plan one phase; refused if tensor cores or TMA cannot take its tiles.

    `awaits` are the flags that are raised for its left operand, by an earlier phase or by those who
    make its rows; `chunks` is the plan of these if they make them chunk by chunk.
    """
    contraction = program.contraction
    for product in contraction.products:
        _check_types(contraction.left.dtype, product)
    consumers, blocks = share_rows(program)
    if program.reduced is not None:
        check_reduced(program.reduced, consumers, blocks)
    if program.exchange is not None:
        _check_slices(program)
    if program.gives is not None:
        check_gather(program.gives, program.store.tile.dtype)
    if program.takes is not None:
        check_depth(program.takes, contraction.depth)
    if program.keeps:
        check_kept(program.store.tile)
    if program.reuses:
        check_kept_room(contraction, consumers)
    at_hand = program.takes or program.reuses
    left = None if at_hand else make_operand(program, contraction.left, k_major=True)
    rights = tuple(
        make_operand(program, each.right, k_major=not each.is_transposed)
        for each in contraction.products
    )
    return PhasePlan(
        program,
        left,
        rights,
        plan_store(program, blocks),
        consumers,
        blocks,
        (program.has_tail(0), program.has_tail(1)),
        Flags.of(program, consumers) if program.staged else None,
        awaits,
        chunks,
        registers[consumers],
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


def plan_phases(programs: tuple[TileProgram, ...]) -> tuple[PhasePlan, ...]:
    """Plan the phases of a kernel in order, each with the flags that it waits for.

    Descriptors that differ have names that differ. Refused if tensor cores or TMA cannot take the
    tiles of a phase, it does not read what an earlier one makes, or phases have tiles of different
    rows or clusters of different sizes.
    """
    phases: list[PhasePlan] = []
    for program in programs:
        left = program.contraction.left
        made = [each.raises for each in phases if each.raises is not None]
        flags = next((each for each in made if each.buffer.same_as(left.buffer)), None)
        if program.rows is not None:
            phases.append(_plan_rows(program, program.rows))
            continue
        if program.streamed is not None:
            phases.append(_plan_streamed(program, program.streamed))
            continue
        if flags is not None:
            flags.check_reader(left, program.analyzer)
        phases.append(plan_phase(program, flags))
    first, *others = phases
    for phase in others:
        found = (phase.rows, phase.program.cluster_size)
        if found != (first.rows, first.program.cluster_size):
            raise _grid_stage_refused(
                "phases of one kernel",
                found=f"tiles of {phase.rows} rows in clusters of {found[1]}",
                limit=f"{first.rows} rows in clusters of "
                f"{first.program.cluster_size}, as in the first phase",
                instead="give all phases tiles of the same rows and one cluster size",
            )
    return _with_distinct_maps(tuple(phases))


def _plan_rows(program: TileProgram, rows: RowProgram) -> PhasePlan:
    """Plan a phase that makes the rows of its left operand."""
    left, chunks = program.contraction.left, plan_chunks(program)
    # Rows count one by one at the flag of their tile; of chunks, each CTA of those that share it.
    columns, tile, raisers = rows.columns, (left.shape[0], rows.columns), left.shape[0]
    if chunks is not None:
        columns = chunks.loop.count * chunks.loop.size
        tile, raisers = (chunks.tile, chunks.loop.size), chunks.sharers
    flags = Flags.of_tiles(rows.buffer, (rows.rows, columns), tile, raisers)
    flags.check_reader(left, program.analyzer)
    phase = plan_phase(program, flags, chunks, registers_beside(rows, REGISTERS))
    check_row_room(phase)
    return phase


def _plan_streamed(program: TileProgram, stream: StreamProgram) -> PhasePlan:
    """Plan a phase whose left operand a stream of tiles stores; refused if they do not fit."""
    left, output = program.contraction.left, stream.output
    if len(output.shape) != 2 or not starts_on_tiles(stream):
        raise _grid_stage_refused(
            f"tensor '{output.buffer.name}'",
            found=f"boxes of {output.rows} x {output.columns} from {list(output.origin)} of a "
            f"tensor of {output.shape}",
            limit="boxes of a matrix side by side, from multiples of their extents on",
            instead="take sequences whose queries are a multiple of the tile's rows, or lower "
            "stream and product as two functions",
        )
    # Of CTAs that share keys each stores a slice of the columns.
    sharers = 1 if stream.split is None else stream.split.place.extent
    raisers = sharers * stream.tile[0] // WARPGROUP_ROWS
    box = (output.rows, output.columns)
    flags = Flags.of_tiles(output.buffer, output.shape, box, raisers)
    flags.check_reader(left, program.analyzer)
    phase = plan_phase(program, flags)
    found = (stream.tile[0], stream.cluster_size)
    if found != (phase.rows, program.cluster_size) or phase.blocks > 1:
        raise _grid_stage_refused(
            "a stream and a product of one kernel",
            found=f"tiles of {found[0]} and {phase.rows} rows, in clusters of "
            f"{found[1]} and {program.cluster_size}",
            limit="tiles of as many rows, at most 192, in clusters of one size: the same "
            "warpgroups go through both",
            instead="give both tiles of the same rows and one cluster size",
        )
    return phase


def _with_distinct_maps(phases: tuple[PhasePlan, ...]) -> tuple[PhasePlan, ...]:
    """Give descriptors of one tensor with different boxes names of their own."""
    names: dict[TensorMap, str] = {}

    def named(map_: TensorMap) -> TensorMap:
        if map_ not in names:
            taken = sum(each.name == map_.name for each in names)
            names[map_] = f"{map_.name}{taken}" if taken else map_.name
        return replace(map_, name=names[map_])

    def renamed(phase: PhasePlan) -> PhasePlan:
        lefts, rights = (
            tuple(replace(each, map=named(each.map)) for each in group)
            for group in (phase.lefts, phase.rights)
        )
        store = phase.store.with_maps(named)
        left = lefts[0] if lefts else None
        return replace(phase, left=left, rights=rights, store=store)

    return tuple(map(renamed, phases))


def box_bytes(phases: tuple[PhasePlan, ...]) -> int:
    """Bytes of a warpgroup's boxes in a place of their own, the most of any phase."""
    return max(each.store.own_bytes for each in phases)
