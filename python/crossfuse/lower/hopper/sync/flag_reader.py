"""Waiting for flags in global memory, and what else may end it."""

from __future__ import annotations

from dataclasses import dataclass
from string import Template
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import Variable, let, when
from crossfuse.lower.hopper.sync.flags import PlacedFlags


@dataclass(frozen=True)
class Ending:
    """What else than flags ends a wait for them: then all that they tell of is there.

    Attributes
    ----------
    kind : str
        End of the name of the function that waits.
    functions, parameters : str
        Text in front of that function, and at the end of its parameters.
    given : tuple
        Their values.
    unless : str
        Condition of a further look at the flags, the same for all lanes.
    over : str
        Statements where the wait is over without flags.
    """

    kind: str = ""
    functions: str = ""
    parameters: str = ""
    given: tuple[Any, ...] = ()
    unless: str = ""
    over: str = ""

    @property
    def words(self) -> dict[str, str]:
        """What the text of the function takes."""
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

    Parameters
    ----------
    placed : PlacedFlags
        Of the tensor.
    launch : Any
        Number of launches before this one.
    ending : Ending | None
        What ends the wait besides.
    """

    def __init__(self, placed: PlacedFlags, launch: Any, ending: Ending | None = None) -> None:
        self.placed = placed
        self.ending = ending or Ending()
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


# Lanes look at neighbouring flags, so that one round trip to L2 tells of many tiles.
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
