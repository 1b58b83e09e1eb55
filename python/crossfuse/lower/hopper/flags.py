"""Flags in global memory: which tiles of an intermediate have been stored in this launch."""

from __future__ import annotations

from dataclasses import dataclass
from string import Template
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Tile
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.hopper.statements import Variable, let, run, when
from crossfuse.lower.image import BufferSpec
from crossfuse.lower.refusal import refuse

#: Name, before the kernel's number, of the buffer with the flags of all phases, then the number of
#: launches that each CTA has seen. Nothing is ever cleared: flags count on from launch to launch.
FLAGS = "crossfuse_flags"


@dataclass(frozen=True)
class Flags:
    """Layout and meaning of the flags of one tensor: a counter for each of its tiles."""

    buffer: Any
    #: Extents of a tile.
    rows: int
    columns: int
    #: Number of tiles along the rows, and along the columns.
    down: int
    across: int
    #: Warpgroups that store a part of a tile, or add to it; each counts once. For rows made one by
    #: one, rows of a tile; for rows made chunk by chunk, CTAs.
    raisers: int
    #: Matrices of the tensor, if it holds several partial ones.
    parts: int = 1

    @property
    def count(self) -> int:
        """Number of flags."""
        return self.parts * self.down * self.across

    @staticmethod
    def of_tiles(
        buffer: Any,
        extents: tuple[int, ...],
        tile: tuple[int, int],
        raisers: int,
        parts: int = 1,
    ) -> Flags:
        """Flags of the tiles of a matrix side by side, each of which `raisers` store parts of."""
        down, across = (-(-extent // size) for extent, size in zip(extents, tile, strict=True))
        return Flags(buffer, *tile, down, across, raisers, parts)

    @staticmethod
    def of(program: TileProgram, raisers: int) -> Flags:
        """Flags of the tiles that a program stores.

        Refused if tiles do not start on multiples of their extents.
        """
        tile = program.store.tile
        known = program.analyzer
        for origin, size in zip(tile.origin, tile.shape, strict=True):
            if not known.can_prove_equal(ir.tirx.floormod(origin, size), 0):
                raise _refuse(tile, f"tiles of {size} from {origin}", "tiles side by side")
        if program.exchange is not None:
            raise _refuse(tile, "sums of several CTAs", "tiles that one CTA computes")
        parts = 1 if program.store.part is None else int(tile.buffer.ty.shape[0])
        return Flags.of_tiles(tile.buffer, tile.extents, tile.shape, raisers, parts)

    def check_reader(self, tile: Tile, known: Any) -> None:
        """Refuse a left tile that needs more than one row of flags."""
        if self.down == 1 and tile.shape[0] >= self.rows:
            return  # all rows that there are
        aligned = known.can_prove_equal(ir.tirx.floormod(tile.origin[0], self.rows), 0)
        if not aligned or tile.shape[0] > self.rows:
            raise _refuse(
                tile,
                f"tiles of {tile.shape[0]} rows from {tile.origin[0]}",
                f"tiles within the {self.rows} rows of one that is stored",
            )


def state(number: int, count: int, ctas: int) -> BufferSpec:
    """The buffer of a kernel's `count` flags, and of the launches that each CTA has seen."""
    return BufferSpec(f"{FLAGS}_{number}", (count + ctas,), "uint32", True)


def _refuse(tile: Tile, found: str, limit: str) -> Exception:
    return refuse(
        "grid-stage",
        f"tensor '{tile.buffer.name}'",
        found=found,
        limit=limit,
        instead="give both phases tiles of the same rows, or leave grid_stage out: then the "
        "intermediate passes from one kernel to the next",
    )


@dataclass(frozen=True)
class PlacedFlags:
    """Flags of a tensor and where they lie."""

    flags: Flags
    #: Buffer of all flags of the kernel.
    memory: Any
    #: Index of the tensor's first flag in it.
    first: int

    def address(self, index: Any) -> Any:
        """Address of one flag of the tensor."""
        return self.memory.ptr_to([self.first + index])

    def raise_flag(self, row: Any, column: Any, part: Any = None) -> None:
        """Count this warpgroup at the flag of the tile that starts there; one thread calls it.

        The thread waited for its own bulk stores, and met the others after theirs. What they wrote
        through either proxy is visible to whoever acquires the flag.
        """
        flags = self.flags
        index = row // flags.rows * flags.across + column // flags.columns
        if part is not None:
            index = part * (flags.down * flags.across) + index
        # A cluster may compute tiles beyond the tensor, which nobody waits for.
        *_, rows, columns = flags.buffer.ty.shape
        with when(ir.script.And(column < int(columns), row < int(rows))):
            flag = self.address(index)
            run(ir.cuda_func_call("crossfuse_raise_flag", flag, source_code=_RAISE))


# Bulk stores are writes of the asynchronous proxy and TMA loads its reads: a proxy fence on either
# side of the flag (PTX ISA, memory consistency model, proxies). That of global memory alone: one of
# all memory waits for the weights that are being loaded to shared memory.
_RAISE = """\
__device__ __forceinline__ void crossfuse_raise_flag(void* flag) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(flag), "r"(1) : "memory");
}
"""

_FENCE = """\
__device__ __forceinline__ void crossfuse_fence_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
"""


def fence_copies() -> None:
    """Order stores of threads to global memory before copies by TMA that read them.

    It stands on either side of the flag that signals the stores.
    """
    run(ir.cuda_func_call("crossfuse_fence_copies", source_code=_FENCE))


@dataclass(frozen=True)
class EndOfWait:
    """An event that ends a wait for flags early: then everything they stand for is there."""

    #: Suffix of the name of the function that waits.
    kind: str = ""
    #: Text in front of that function.
    functions: str = ""
    #: Text at the end of its parameters.
    parameters: str = ""
    #: Arguments for these parameters.
    given: tuple[Any, ...] = ()
    #: Condition of a further look at the flags, the same for all lanes.
    unless: str = ""
    #: Statements for a wait that is over without flags.
    over: str = ""

    @property
    def words(self) -> dict[str, str]:
        """Substitutions for the template of the function."""
        over = "    if (known <= last) {\n" + self.over + "      known = last + 1;\n    }\n"
        return {
            "functions": self.functions,
            "kind": self.kind,
            "parameters": self.parameters,
            "unless": self.unless and f" &&\n             !{self.unless}",
            "over": self.over and over,
        }


class FlagReader:
    """Waits for the tiles of a row, in the order of its columns. A whole warp calls it.

    `launch` is the number of launches before this one: flags are never cleared, but count on.
    """

    def __init__(self, placed: PlacedFlags, launch: Any, ending: EndOfWait | None = None) -> None:
        self.placed = placed
        self.ending = ending or EndOfWait()
        raised = ir.script.uint32(placed.flags.raisers)
        self.target = let("flag_target", (launch + ir.script.uint32(1)) * raised)
        self.ready = Variable("ready", "int32")

    def start(self, row: Any, column: Any) -> None:
        """Begin with the tile that holds an element."""
        flags = self.placed.flags
        self._row = let("flag_row", row // flags.rows * flags.across)
        self.ready.set(column // flags.columns)

    def wait(self, column: Any) -> None:
        """Wait for all tiles up to the one that holds an element of a column."""
        flags = self.placed.flags
        last = ir.script.min(column // flags.columns, flags.across - 1)
        with when(self.ready.value <= last):
            self.ready.set(
                ir.cuda_func_call(
                    f"crossfuse_await_flags{self.ending.kind}",
                    self.placed.address(self._row),
                    self.ready.value,
                    last,
                    ir.script.int32(flags.across),
                    self.target,
                    *self.ending.given,
                    source_code=_AWAIT.substitute(self.ending.words),
                    return_type="int32",
                )
            )


# Lanes look at neighbouring flags, so that one round trip to L2 answers for many tiles.
_AWAIT = Template("""\
${functions}__device__ __forceinline__ int crossfuse_await_flags$kind(\
const void* flags, int ready, int last,
                                                     int count, unsigned target$parameters) {
  while (ready <= last) {
    const int mine = ready + (threadIdx.x & 31);
    const unsigned* flag = (const unsigned*)flags + mine;
    bool raised = mine >= count;
    unsigned missing = 0;
    int known = ready;
    do {
      if (!raised) {
        unsigned seen;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        raised = seen == target;
      }
      missing = __ballot_sync(0xffffffffu, !raised);
      known = ready + (missing ? __ffs(missing) - 1 : 32);
    } while (missing && known <= last$unless);
$over    ready = known;
  }
  __syncwarp();
  asm volatile("fence.proxy.async.global;" ::: "memory");
  return ready < count ? ready : count;
}
""")
