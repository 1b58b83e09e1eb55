"""Code that runs once is fetched before it is needed.

What follows a product runs once in a kernel of one tile a CTA: several thousand instructions one
after another, each new line of them from L2, behind all weights that are being loaded. So its
warpgroups go through all code twice. The first time, the warm-up, nothing is multiplied, stored or
waited for; it takes place while the first tiles are on their way. On an H100 small FFNs took 4 us
less with it (docs/hopper-measured.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import when

#: Hides a value from the compiler, which would else make code of its own for the warm-up.
_HIDE = """\
__device__ __forceinline__ int crossfuse_hide(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
"""


class Warmup:
    """Tells the warm-up from what counts.

    Parameters
    ----------
    turn : Any
        0 in the warm-up, 1 after it; None where there is none.
    """

    def __init__(self, turn: Any = None) -> None:
        self.turn = turn

    def conditions(self) -> list[Any]:
        """Conditions of statements that only count."""
        return [] if self.turn is None else [hidden(self.turn) > 0]

    def turns(self, count: int) -> Any:
        """How often a loop runs that counts to `count`: once in the warm-up."""
        return count if self.turn is None else hidden(self.turn) * (count - 1) + 1

    def skipped(self) -> Any:
        """A context for statements that the warm-up leaves out."""
        return when(self.conditions()[0]) if self.turn is not None else nullcontext()


@contextmanager
def warmed_up(wanted: bool) -> Iterator[Warmup]:
    """Statements that run twice if `wanted`, once if not."""
    if not wanted:
        yield Warmup()
        return
    with ir.script.serial(0, hidden(ir.script.int32(2))) as turn:
        ir.IRBuilder.name("turn", turn)
        yield Warmup(turn)


def hidden(value: Any) -> Any:
    """A value of which the compiler knows nothing, and which it does not compute ahead of time."""
    return ir.cuda_func_call("crossfuse_hide", value, source_code=_HIDE, return_type="int32")
