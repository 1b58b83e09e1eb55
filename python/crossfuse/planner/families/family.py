"""What a family of kernels says of itself.

A family has a file in this folder and a place in `crossfuse.planner.families.registry`; everything
else asks these objects. Schedule rules are named, not imported: a plan needs no TVM, and rules read
plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from importlib import import_module
from typing import Any

import numpy as np

from crossfuse.errors import PlanRefused, ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.shape import NOTHING, Shape, Step, count, flags, narrowed, select
from crossfuse.schema import Damaged, typed

_RULES = "crossfuse.schedule.rules"


def of_rules(path: str) -> Any:
    """Load a function or class of the schedule rules, such as ``stream.schedule_stream``."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{_RULES}.{module}"), name)


@dataclass(frozen=True)
class ChainFamily:
    """Kernels of a chain of products, whose intermediate lives in one place."""

    #: Their tiles, as the planner counts them.
    kernel: type[TileKernel]
    #: Where the intermediate is, in a few words.
    text: str
    #: Products of the chains that it has kernels of, one behind the other.
    products: int
    #: The schedule rule, and for each of its arguments that are tiles their type, see `of_rules`.
    rule: str
    tiles: Mapping[str, str]
    #: Whether the rule counts the CTAs of a device, its argument ``target``.
    counts: bool = True
    #: Arguments of the rule that all kernels of the family have.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    #: Names that `crossfuse.compile` takes for where the intermediate lives, with what a benchmark
    #: of each measures.
    placements: Mapping[str, str] = field(default_factory=dict)
    #: Fields that divide the second phase: a crossover takes them from the other parent.
    second: tuple[str, ...] = ()
    #: Whether there are kernels of chains of any extents, which are tried first where nothing is
    #: known of times.
    fits_all: bool = False
    #: Whether there are kernels of chains of more products, too.
    longer: bool = False
    #: Rows of chains that it has kernels of, at most; 0 for any number.
    most_rows: int = 0
    #: Whether the output may be made of two products of one operand, gate and up.
    pairs: bool = False

    @property
    def name(self) -> str:
        """As plans and candidates name it."""
        return self.kernel.family

    @property
    def summary(self) -> str:
        """What it is, and the rule that writes its kernels."""
        fixed = ", ".join(f"{name}={value}" for name, value in self.fixed.items())
        rule = self.rule.rpartition(".")[2]
        return f"{self.text}: {rule}({fixed})" if fixed else f"{self.text}: {rule}"

    @property
    def pipelined(self) -> bool:
        """Whether its kernels are those of the Hopper pipeline, which takes fewer rows, too."""
        return self.kernel.staged_tiles

    def matches(self, shape: Shape) -> bool:
        """Whether there may be kernels of a chain."""
        if self.longer:
            return self.products <= len(shape.layers)
        of_layers = self.products == len(shape.layers) and not shape.chain
        return of_layers and not self._too_many_rows(shape) and not self._ends_in_pair(shape)

    def _ends_in_pair(self, shape: Shape) -> bool:
        return not self.pairs and shape.layers[-1].products > 1

    def _too_many_rows(self, shape: Shape) -> bool:
        return bool(self.most_rows) and shape.m > self.most_rows

    def open_tiles(self, cluster: int) -> dict[str, Any]:
        """Tiles that leave all to the rule but the CTAs of a cluster; 0 leaves these, too."""
        first, *others = self.tiles
        given = {"cluster": cluster}
        return {first: given} if others else given

    def schedule(
        self,
        func: Any,
        tiles: Mapping[str, Any],
        target: str | Device,
        *,
        constant_weights: bool = False,
    ) -> Any:
        """Schedule a canonical function as a kernel of the family.

        Tiles are fields of the type of the rule's argument; where it has several, by the names of
        these. Others are refused, and those left out are chosen for `target`, whose CTAs the rules
        count. No kernel that may still be running writes weights that are `constant_weights`.
        """
        counted = {"target": target} if self.counts else {}
        given = {**self._arguments(tiles), **self.fixed, **counted}
        return of_rules(self.rule)(func, constant_weights=constant_weights, **given)

    def _arguments(self, tiles: Mapping[str, Any]) -> dict[str, Any]:
        """Convert tiles to the rule's arguments."""
        kinds = {name: of_rules(path) for name, path in self.tiles.items()}
        parts = [(name, kind, field(default_factory=kind)) for name, kind in kinds.items()]
        try:
            if len(kinds) == 1:
                return {name: typed(kind, tiles) for name, kind in kinds.items()}
            chosen: Any = typed(make_dataclass("Tiles", parts, frozen=True), tiles)
        except Damaged as error:
            raise refuse(
                ScheduleRefused,
                "tiles",
                f"family '{self.name}'",
                found=error.found,
                limit=error.limit,
                instead="name tile extents like these",
            ) from None
        return {name: getattr(chosen, name) for name in kinds}

    def tried(self, shape: Shape, device: Device, given: Mapping[str, int] = NOTHING) -> TileKernel:
        """List all tiles before any rule, see `TileKernel.possible`."""
        return self.kernel.possible(shape, given)

    def every(self, shape: Shape, device: Device) -> TileKernel:
        """List all legal tiles as arrays, which are empty where nothing fits."""
        found = self.tried(shape, device)
        legal = found.legal(shape, device) if shape.multiplies else False
        found = select(found, flags(found, legal))
        return select(found, flags(found, found.fits(shape, device))) if count(found) else found

    def pruned(self, shape: Shape, device: Device) -> tuple[Step, ...]:
        """Count the tiles that are left after each rule in turn.

        The steps are ``"all"``, the family's rules, and ``"shared"``, which leaves as many as
        `every`.
        """
        found = self.tried(shape, device)
        left = np.ones(count(found), bool)
        steps = [Step("all", "tiles that are tried", len(left))]
        if not shape.multiplies:
            left &= False
            operands = "operands of 16 bits, or of 8 bits stored as [n, k]"
            steps.append(Step("operands", operands, 0))
        ruled, left = narrowed(left, found.rules(shape, device))
        few = select(found, left)
        fits = int(np.count_nonzero(flags(few, few.fits(shape, device)))) if count(few) else 0
        room = f"two stages of each ring fit {device.max_shared_bytes >> 10} KiB of shared memory"
        return (*steps, *ruled, Step("shared", room, fits))

    def why_none(self, shape: Shape, device: Device) -> str:
        """Say why there are no tiles that fit: the rule after which none were left."""
        if self._too_many_rows(shape):
            return f"{self.name} has kernels of at most {self.most_rows} rows"
        if self._ends_in_pair(shape):
            return f"{self.name} has no kernels of gate and up without a product of both"
        if not self.matches(shape):
            count = len(shape.layers)
            what = ("one product", "two products")[count - 1] if count < 3 else f"{count} layers"
            return f"{self.name} has no kernels of {what}"
        steps = self.pruned(shape, device)
        last = next((each for each in steps if not each.candidates), steps[-1])
        return (
            f"'{last.text}' leaves {last.candidates} of {steps[0].candidates} tiles of {self.name}"
        )

    def read(self, tiles: Mapping[str, Any]) -> TileKernel:
        """Make a kernel of the fields of its rule's tiles; refuses tiles that do not say enough."""
        try:
            return self.kernel.read(tiles)
        except Damaged as missing:
            raise refuse(
                PlanRefused,
                "kernel-tiles",
                self.name,
                found=missing.found,
                limit="every field that says how the chain is divided",
                instead="write the field; nothing is chosen for a kernel that is given",
            ) from missing
