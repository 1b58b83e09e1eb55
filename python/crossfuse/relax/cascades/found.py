"""Values: what a function is as a cascade, and a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Derivation
from crossfuse.cascade.site import Site
from crossfuse.planner.families import ROWS

#: Forms of kernels: of products, of threads that stream, of rows in their product's kernel.
TILES, THREADS, ROWS_FIRST = "tiles", "threads", ROWS


@dataclass(frozen=True, eq=False)
class Found:
    """A function as a cascade.

    Attributes
    ----------
    func : tvm.tirx.PrimFunc
        As it was given.
    site : Site | None
        Its only cascade, in a function that counts in 32 bits; None if it has none, or several.
    derivation : Derivation | None
        How the cascade streams.
    reason : str
        Why it does not; empty if it does.
    """

    func: Any
    site: Site | None = None
    derivation: Derivation | None = None
    reason: str = ""

    @property
    def stages(self) -> int:
        """Reductions that share the axis."""
        return len(self.site.stages) if self.site else 0

    @property
    def producers(self) -> frozenset[str]:
        """Blocks that make elements."""
        return frozenset(self.site.producers.values()) if self.site else frozenset()

    @property
    def is_product(self) -> bool:
        """Whether a stage has many results for a row, or no element belongs to one row alone."""
        if self.site is None:
            return False
        rows = [each for each in self.site.rows if int(self.site.extents[each]) > 1]
        reads = [self.site.reads[each] for each in self.site.cascade.elements]
        shared = bool(reads) and not any(mentions_all(each, rows) for each in reads)
        return shared or any(each.columns for each in self.site.stages.values())

    @property
    def is_plain(self) -> bool:
        """Whether it is one reduction that reads each element once, or two products in a row."""
        return bool(self.plain)

    @property
    def plain(self) -> str:
        """Why there is nothing to stream; empty if there is."""
        site = self.site
        if site is None or self.stages != 1 or site.cascade.rows:
            return ""
        if not site.producers:
            return "it has one reduction, which reads each element once as it is"
        return "it is a product of what another product makes" if self.is_product else ""


@dataclass(frozen=True, eq=False)
class Kernel:
    """What a cascade becomes.

    Attributes
    ----------
    form : str
        `TILES`, `THREADS` or `ROWS_FIRST`.
    func : tvm.tirx.PrimFunc
        Scheduled.
    bytes : int
        That it moves, see `crossfuse.relax.cascades.traffic`.
    why : str
        What the planner estimated, where separate kernels could be faster; else empty.
    """

    form: str
    func: Any
    bytes: int
    why: str = ""


def mentions_all(expression: Any, variables: list[Any]) -> bool:
    """Whether an expression has all of some variables."""
    used = list(ir.variables(expression))
    return all(any(each.same_as(var) for var in used) for each in variables)
