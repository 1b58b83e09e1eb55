"""What a plan moves and multiplies, level by level, with the time that each would take alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.cost.rates import Rates, at
from crossfuse.planner.kernels.every import Kernel
from crossfuse.planner.kernels.shape import Shape

#: Instructions of cascades, which have levels of their own.
SPECIAL, PLAIN = "exponentials", "issue"
#: Levels in the order in which they are told, with what is counted.
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
    """One level of a plan.

    Attributes
    ----------
    name : str
        One of `LEVELS`, or of `CASCADE_LEVELS`.
    amount : int
        Bytes; of ``"tensor"`` floating-point operations, of `SPECIAL` and `PLAIN` instructions.
    microseconds : float | None
        As if nothing else took time. None for registers, since the measured rates of tensor cores
        contain what wgmma reads.
    """

    name: str
    amount: int
    microseconds: float | None

    @property
    def text(self) -> str:
        """The amount as a person reads it."""
        units = {"tensor": "Gflop", SPECIAL: "G", PLAIN: "G"}
        if self.name in units:
            return f"{self.amount / 1e9:.2f} {units[self.name]}"
        return size_text(self.amount)


def size_text(size: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def levels(
    chain: Chain,
    kernel: Kernel | None,
    shape: Shape,
    moved: Mapping[str, int],
    times: Mapping[str, float],
    rates: Rates,
    ctas: int,
) -> tuple[Level, ...]:
    """List the levels of a plan.

    Parameters
    ----------
    chain, shape : Chain, Shape
        What is computed.
    kernel : Kernel | None
        Of one candidate; None of a library's kernels, of which only HBM and flops are known.
    moved : Mapping[str, int]
        See `crossfuse.planner.choice.Choice.bytes`.
    times : Mapping[str, float]
        See `crossfuse.planner.cost.alone.alone`.
    rates : Rates
        Of the device.
    ctas : int
        That send to peers at the same time.
    """
    found = [Level("tensor", chain.flops, times["tensor"])]
    if kernel is not None:
        rate = float(at(rates.measured.dsm_push, int(kernel.cluster)))
        sent = moved["dsm"] / (ctas * rate)
        found += [
            Level("registers", operand_bytes(kernel, shape), None),
            Level("shared", arriving_bytes(kernel, shape) + moved["dsm"], times["ingest"] + sent),
            Level("dsm", moved["dsm"], sent),
            Level("l2", moved["l2"], times["l2"]),
        ]
    return (*found, Level("hbm", moved["hbm"], times["hbm"]))


def arriving_bytes(kernel: Kernel, shape: Shape) -> int:
    """Bytes of tiles that TMA brings into the shared memory of all CTAs of one candidate."""
    size = int(kernel.cluster)
    phases = kernel.phases(shape)
    return sum(int(each.tiles * size * each.steps * (each.left + each.right)) for each in phases)


def operand_bytes(kernel: Kernel, shape: Shape) -> int:
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
