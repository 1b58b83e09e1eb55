"""Decides everything that a kernel needs to know, before any of it is written."""

from __future__ import annotations

from dataclasses import dataclass

from crossfuse.hardware import Device
from crossfuse.lower.hopper.arena import Arena
from crossfuse.lower.hopper.operand import Operand, item_bytes, make_operand, tensor_map
from crossfuse.lower.hopper.tile_program import Product, TileProgram
from crossfuse.lower.image import TensorMap
from crossfuse.lower.refusal import refuse

#: Rows that a warpgroup multiplies: M of every wgmma.
WARPGROUP_ROWS = 64
#: Rows of a warpgroup's tile that each of its warps holds.
WARP_ROWS = 16
#: Threads of a warpgroup.
WARPGROUP = 128
#: Element types of operands, with the type's name in PTX and the k of its wgmma.
OPERAND_TYPES = {
    "float16": ("f16", 16),
    "bfloat16": ("bf16", 16),
    "float8_e4m3fn": ("e4m3", 32),
    "float8_e5m2": ("e5m2", 32),
}
#: Types of which two are converted into one register, by what PTX calls the pair.
PACKED_TYPES = {"bfloat16": "bf16x2", "float16": "f16x2"}
#: Registers a thread by the number of multiplying warpgroups: of the loading one, and of the
#: others; 0 leaves them as launched. Together at most 64 Ki a CTA.
REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}
#: Accumulators of a thread that leave room for addresses and the epilogue.
_MAX_ACCUMULATORS = {1: 128, 2: 128, 3: 96}
_MAX_STAGES = 12
_ALIGNMENT = 1024


@dataclass(frozen=True)
class StorePlan:
    """How a tile leaves registers.

    Attributes
    ----------
    map : TensorMap | None
        Boxes of 64 rows, staged in shared memory and stored by TMA; None stores elements directly.
    box_columns : int
        Columns of a box.
    """

    map: TensorMap | None
    box_columns: int


@dataclass(frozen=True)
class KernelPlan:
    """A kernel's decisions.

    Attributes
    ----------
    program : TileProgram
        What it computes.
    left : Operand
        How the left tile is loaded.
    rights : tuple[Operand, ...]
        How each product's right tile is loaded.
    store : StorePlan
        How the result is stored.
    consumers : int
        Warpgroups that multiply; one more loads.
    stages : int
        Of the ring.
    arena : Arena
        Shared memory: ``left``, ``right0`` and so on, ``boxes`` (if stored by TMA), ``received``
        (if the reduction is split), ``barriers``.
    clusters : int
        Clusters launched; each goes through tiles ``c, c + clusters, ...``.
    tails : tuple[bool, bool]
        Whether tiles of the output reach beyond its rows, and beyond its columns.
    early : bool
        Whether it starts before the kernel that makes its left operand is over: right tiles are
        loaded meanwhile.
    """

    program: TileProgram
    left: Operand
    rights: tuple[Operand, ...]
    store: StorePlan
    consumers: int
    stages: int
    arena: Arena
    clusters: int
    tails: tuple[bool, bool]
    early: bool = False

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def columns(self) -> int:
        """Columns of the tile: N of the wgmma."""
        return self.program.contraction.columns

    @property
    def accumulators(self) -> int:
        """Float32 registers of one product's tile in a thread."""
        return self.columns // 2

    @property
    def stage_bytes(self) -> int:
        """Bytes that arrive in a stage."""
        return sum(each.size for each in self.operands)

    @property
    def is_multicast(self) -> bool:
        """Whether CTAs load for each other."""
        return max(each.sharers for each in self.operands) > 1

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Everything that is loaded."""
        return (self.left, *self.rights)

    @property
    def slice_bytes(self) -> int:
        """Bytes of the partial sums that one CTA sends to another; 0 without an exchange."""
        exchange = self.program.exchange
        return 0 if exchange is None else _sent_bytes(self.program, self.consumers)


def operand_names(count: int) -> tuple[str, ...]:
    """Names of the regions of the left operand and of each right one."""
    return ("left", *(f"right{index}" for index in range(count - 1)))


def plan_kernel(program: TileProgram, device: Device) -> KernelPlan:
    """Plan a kernel.

    Parameters
    ----------
    program : TileProgram
        From `recover`.
    device : Device
        Its shared memory and SMs.

    Returns
    -------
    KernelPlan
        For `kernel`.

    Raises
    ------
    LoweringRefused
        If tensor cores or TMA cannot take the tiles.
    """
    contraction = program.contraction
    for product in contraction.products:
        _check_types(contraction.left.dtype, product)
    consumers = _consumers(program)
    left = make_operand(program, contraction.left, k_major=True)
    rights = tuple(
        make_operand(program, each.right, k_major=not each.is_transposed)
        for each in contraction.products
    )
    store = _plan_store(program)
    arena = Arena()
    if store.map is not None:
        boxes = 2 * consumers * WARPGROUP_ROWS * store.map.swizzle
        arena = arena.with_region("boxes", boxes, _ALIGNMENT)
    if program.exchange is not None:
        arena = _with_receive(program, consumers, arena)
    stages, arena = _plan_stages(program, (left, *rights), arena, device)
    clusters = min(program.tiles, max(1, device.sms // program.cluster_size))
    if program.exchange is not None:
        # What peers send has one place: a cluster computes one tile.
        clusters = program.tiles
    tails = (program.has_tail(0), program.has_tail(1))
    early = program.follows and clusters == program.tiles
    return KernelPlan(
        program, left, rights, store, consumers, stages, arena, clusters, tails, early
    )


def has_whole_warps(program: TileProgram, consumers: int) -> bool:
    """Whether each slice of a split reduction is the rows of whole warps of a full tile."""
    exchange = program.exchange
    assert exchange is not None
    rows = exchange.rows * exchange.place.extent
    full = rows == consumers * WARPGROUP_ROWS and exchange.width == program.contraction.columns
    return full and exchange.rows % WARP_ROWS == 0


def _sent_bytes(program: TileProgram, consumers: int) -> int:
    """Bytes of one CTA's slice, as another CTA sends it."""
    exchange = program.exchange
    assert exchange is not None
    if has_whole_warps(program, consumers):
        return exchange.rows * program.contraction.columns * 4
    return exchange.elements * 4


def _with_receive(program: TileProgram, consumers: int, arena: Arena) -> Arena:
    """Room for what the other CTAs send of this one's slice, and its barrier."""
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
    size = (exchange.place.extent - 1) * _sent_bytes(program, consumers)
    arena = arena.with_region("received", size, _ALIGNMENT)
    return arena.with_region("received_barrier", 8, 8)


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


def _consumers(program: TileProgram) -> int:
    rows, columns = program.contraction.rows, program.contraction.columns
    consumers = rows // WARPGROUP_ROWS
    most = 2 * _MAX_ACCUMULATORS.get(consumers, 0) // len(program.contraction.products)
    if rows % WARPGROUP_ROWS or consumers not in REGISTERS or columns % 8 or columns > most:
        raise refuse(
            "tile-shape",
            f"product of '{program.contraction.products[0].accumulator.name}'",
            found=f"a tile of {rows} x {columns}",
            limit="64 or 128 rows with columns in multiples of 8 up to 256, or 192 rows with up "
            "to 192 columns",
            instead="split rows and columns by other factors",
        )
    return consumers


def _plan_store(program: TileProgram) -> StorePlan:
    """By TMA where elements are 16 bits wide and rows of the output can be copied."""
    tile = program.store.tile
    pitch = tile.extents[1] * item_bytes(tile.dtype)
    width = next((each for each in (64, 32, 16) if tile.shape[1] % each == 0), 0)
    packed = tile.dtype in PACKED_TYPES
    if not packed or pitch % 16 or not width or program.exchange is not None:
        return StorePlan(None, 8)
    return StorePlan(tensor_map(tile, (width, WARPGROUP_ROWS), 2 * width), width)


def _plan_stages(
    program: TileProgram, operands: tuple[Operand, ...], rest: Arena, device: Device
) -> tuple[int, Arena]:
    """As many stages as fit, or as many as were asked for."""
    wanted = program.contraction.stages

    def arena(stages: int) -> Arena:
        regions = rest
        for name, operand in zip(operand_names(len(operands)), operands, strict=True):
            regions = regions.with_region(name, stages * operand.size, _ALIGNMENT)
        return regions.with_region("barriers", 16 * stages, 8)

    options = [wanted] if wanted else list(range(_MAX_STAGES, 1, -1))
    for stages in options:
        if arena(stages).size <= device.max_shared_bytes:
            return stages, arena(stages)
    least = arena(options[-1])
    raise refuse(
        "shared-memory",
        "kernel",
        found=f"{least.size} bytes for {options[-1]} stages of "
        f"{sum(each.size for each in operands)} bytes",
        limit=f"{device.max_shared_bytes} bytes on {device.name}",
        instead="use fewer stages or smaller tiles",
    )
