"""Traffic and work of a plan level by level, with the time that each would take alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.cascade.rewrite.work import TileWork, Work
from crossfuse.hardware import Device
from crossfuse.planner.cascade.tile_cost import steps_of
from crossfuse.planner.chain.spec import Chain, Tensor
from crossfuse.planner.cost.rates import Rates, at
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.memory import Memory, cached_level
from crossfuse.planner.kernels.shape import Shape

#: Instructions of cascades, which have levels of their own.
SPECIAL, PLAIN = "exponentials", "issue"
#: Levels in the order in which they are shown, with what is counted.
LEVELS = {
    "tensor": "multiplications and additions",
    "registers": "operands that wgmma reads from shared memory",
    "shared": "tiles that arrive in shared memory, from L2 or peers",
    "dsm": "between the CTAs of clusters",
    "l2": "what CTAs read, once for all that share it, and write",
    "hbm": "inputs and output, once each; the time is of weights, some of them again, and of "
    "what epilogues read",
}
#: Levels of cascades that chains do not have, or count otherwise.
CASCADE_LEVELS = {
    "tensor": LEVELS["tensor"],
    SPECIAL: "results of the special-function units: exponentials, roots, quotients",
    PLAIN: "additions, products and comparisons",
    "shared": "tiles that arrive in shared memory, or elements kept there",
    "dsm": "states between the CTAs of clusters",
    "l2": "what CTAs read and write",
    "hbm": "inputs and outputs, and what is loaded again",
}


@dataclass(frozen=True)
class Level:
    """Traffic or work of a plan at one level."""

    #: One of `LEVELS`, or of `CASCADE_LEVELS`.
    name: str
    #: Bytes; of ``"tensor"`` floating-point operations, of `SPECIAL` and `PLAIN` instructions.
    amount: int
    #: As if nothing else took time. None for registers, since the measured rates of tensor cores
    #: contain what wgmma reads.
    microseconds: float | None

    @property
    def text(self) -> str:
        """Format the amount for people."""
        units = {"tensor": "Gflop", SPECIAL: "G", PLAIN: "G"}
        if self.name in units:
            return f"{self.amount / 1e9:.2f} {units[self.name]}"
        return size_text(self.amount)


def instructions(work: Work) -> dict[str, int]:
    """Instructions of a cascade beside products, by level."""
    elements = work.rows * work.length
    return {SPECIAL: elements * work.exponentials, PLAIN: elements * work.operations}


def tile_instructions(work: TileWork, tiles: CascadeTiles) -> dict[str, int]:
    """Operations of both products of a stream of tiles, and instructions for each score."""
    found = steps_of(work, tiles)
    elements = found.total * found.sizes.rows * found.sizes.elements
    return {
        "tensor": 2 * elements * (work.depth + found.sizes.columns),
        SPECIAL: elements * work.exponentials,
        PLAIN: elements * work.operations,
    }


def size_text(size: float) -> str:
    """Format bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def levels(
    chain: Chain,
    kernel: TileKernel | None,
    shape: Shape,
    moved: Mapping[str, int],
    times: Mapping[str, float],
    rates: Rates,
    ctas: int,
) -> tuple[Level, ...]:
    """List the levels of a plan.

    `kernel` is None for a library's kernels, of which only HBM and flops are known. `moved` is
    `Plan.bytes`, `times` comes from `crossfuse.planner.cost.estimate.alone`, and `ctas` send to
    peers at the same time.
    """
    found = [Level("tensor", chain.flops, times["tensor"])]
    if kernel is not None:
        rate = float(at(rates.measured.dsm_push, int(kernel.cluster)))
        sent = moved["dsm"] / (ctas * rate)
        if kernel.staged_tiles:
            arriving = arriving_bytes(kernel, shape) + moved["dsm"]
            found += [
                Level("registers", operand_bytes(kernel, shape), None),
                Level("shared", arriving, times["ingest"] + sent),
            ]
        found += [Level("dsm", moved["dsm"], sent), Level("l2", moved["l2"], times["l2"])]
    return (*found, Level("hbm", moved["hbm"], times["hbm"]))


def arriving_bytes(kernel: TileKernel, shape: Shape) -> int:
    """Bytes of tiles that TMA loads into the shared memory of all CTAs of one candidate."""
    size = int(kernel.cluster)
    phases = kernel.phases(shape)
    return sum(int(each.tiles * size * each.steps * (each.left + each.right)) for each in phases)


def operand_bytes(kernel: TileKernel, shape: Shape) -> int:
    """Bytes that wgmma reads from shared memory: instructions of 64 rows, a product at a time.

    Left operands that are in registers already are not read.
    """
    size, total = int(kernel.cluster), 0
    held = False
    for phase in kernel.phases(shape):
        blocks = int(phase.rows) // 64
        left = 0 if held else phase.products * int(phase.rows * phase.depth) * shape.item
        total += int(phase.tiles) * size * int(phase.steps) * (left + blocks * int(phase.right))
        held = phase.keeps
    return total


# The rows, columns and share of the reduction of each CTA of a cluster, phase by phase.

#: From the first one to the one after the last.
Range = tuple[int, int]


@dataclass(frozen=True)
class Share:
    """The part of its first tile that one CTA of the first cluster computes."""

    #: The layer, counted from 0.
    phase: int
    #: Rank in the cluster.
    cta: int
    #: Of the phase's output, clipped to it; empty where a tile lies beyond.
    rows: Range
    columns: Range
    #: Range of the reduction that it sums.
    reduction: Range


def layout(kernel: TileKernel, shape: Shape) -> tuple[Share, ...]:
    """Find the share of each CTA of the first cluster, of one candidate.

    Ranks count along the cluster's first axis, then along its second one, as the schedule rules
    bind them.
    """
    return tuple(
        _share(kernel, shape, phase, cta)
        for phase in range(len(kernel.phases(shape)))
        for cta in range(int(kernel.cluster))
    )


def _share(kernel: TileKernel, shape: Shape, phase: int, cta: int) -> Share:
    row, column, part = kernel.tile_of(phase, cta)
    found = kernel.phases(shape)[phase]
    layer = shape.layers[phase]
    step = int(found.steps * found.depth)
    return Share(
        phase,
        cta,
        _range(row, int(found.rows), shape.m),
        _range(column, int(found.columns), layer.columns),
        _range(part, step, layer.depth),
    )


def _range(index: int, size: int, extent: int) -> Range:
    return min(index * size, extent), min((index + 1) * size, extent)


# Where each tensor of a plan lives.


@dataclass(frozen=True)
class Place:
    """Where a tensor, or its partial sums, lives between what makes it and what reads it."""

    tensor: str
    #: ``"input"``, ``"intermediate"``, ``"output"``, or ``"sums"``: partial sums of the tensor.
    role: str
    #: Of the whole tensor as stored; of sums those that a CTA holds.
    bytes: int
    #: ``"registers"``, ``"shared"``, ``"dsm"``, ``"l2"`` or ``"hbm"``.
    level: str
    #: How it gets there.
    text: str


def places(
    chain: Chain, kernel: TileKernel | None, shape: Shape, rooms: Sequence[Memory], device: Device
) -> tuple[Place, ...]:
    """Find where every tensor of a chain lives, in the order in which they are used.

    `kernel` is None for a library's kernels, whose shared memory (`rooms`, by kernel) is not known.
    """
    found = []
    for index, product in enumerate(chain.products):
        room = rooms[min(index, len(rooms) - 1)] if rooms else None
        if not index:
            found.append(_input(chain, chain.tensor(product.left), _ring(room, "left")))
        found += [
            _input(chain, chain.tensor(each), _ring(room, "right")) for each in product.rights
        ]
        found += [
            _input(chain, chain.tensor(each), "read by the epilogue into registers")
            for each in product.further
        ]
        if kernel is not None:
            found += _sums(kernel, shape, index, product.output)
        tensor = chain.tensor(product.output)
        size = chain.stored_bytes(tensor.name)
        if tensor.role == "intermediate":
            level, text = _between(kernel, shape, size, device)
            found.append(Place(tensor.name, tensor.role, size, level, text))
        else:
            found.append(Place(tensor.name, tensor.role, size, "hbm", "written once"))
    return tuple(found)


def _input(chain: Chain, tensor: Tensor, text: str) -> Place:
    return Place(tensor.name, "input", chain.stored_bytes(tensor.name), "hbm", text)


def _ring(room: Memory | None, side: str) -> str:
    if room is None:
        return "read by the library"
    stages = int(room.left if side == "left" else room.right)
    if not stages:
        return "through L2 into registers"
    return f"through L2 and a ring of {stages} {side} tiles in shared memory"


def _between(kernel: TileKernel | None, shape: Shape, size: int, device: Device) -> tuple[str, str]:
    """Level of the intermediate, and how it gets there."""
    if kernel is None:
        return cached_level(size, device), "stored by a kernel, read by the next"
    return kernel.intermediate(shape, size, device)


def _sums(kernel: TileKernel, shape: Shape, index: int, name: str) -> list[Place]:
    """Places of the sums of a product, and of partial sums that are exchanged."""
    phase = kernel.phases(shape)[index]
    tile = int(phase.rows * phase.columns) * phase.products * 4
    found = [Place(name, "sums", tile, "registers", f"{int(phase.sums)} of each thread")]
    split, last = int(phase.split), index == len(kernel.phases(shape)) - 1
    if split > 1:
        text = f"{split} CTAs send slices of their sums to each other"
        found.append(Place(name, "sums", int(phase.received), "dsm", text))
    elif last and kernel.added_parts > 1:
        text = f"{int(kernel.added_parts)} parts store theirs, and each adds a slice of all"
        found.append(Place(name, "sums", tile, "l2", text))
    return found
