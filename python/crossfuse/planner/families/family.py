"""What a family of kernels says of itself: of chains of products, and of cascades.

A family has a file in this folder and a place in `crossfuse.planner.families.registry`; everything
else asks these objects. Schedule rules are named, not imported: a plan needs no TVM, and rules read
plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from importlib import import_module
from math import log
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, cast

import numpy as np

from crossfuse.cascade.rewrite.work import TileWork, Work
from crossfuse.errors import PlanRefused, ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.shape import NOTHING, Shape, Step, count, flags, narrowed, select
from crossfuse.schema import Damaged, typed

if TYPE_CHECKING:
    from crossfuse.cascade.spec import Derivation, Site


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


# Families of cascades, which say the same of themselves as `ChainFamily` does of chains.

T = TypeVar("T")
W = TypeVar("W", bound=Work | TileWork)
Steps: TypeAlias = "tuple[Step, ...]"
#: Tiles with their estimated microseconds.
Timed: TypeAlias = "tuple[float, T]"
#: A rule on tiles: its name, what it keeps in words, and whether tiles keep it.
Rule: TypeAlias = "tuple[str, str, Callable[[T], Any]]"


def keep_rules(tiles: Sequence[T], rules: Sequence[Rule[T]]) -> tuple[Steps, tuple[T, ...]]:
    """Select the tiles that keep all rules; also how many tiles each rule in turn leaves."""
    left = list(tiles)
    steps = [Step("all", "tiles that are tried", len(left))]
    for name, text, keeps in rules:
        left = [each for each in left if keeps(each)]
        steps.append(Step(name, text, len(left)))
    return tuple(steps), tuple(left)


@dataclass(frozen=True)
class Taken:
    """Resources of the device that a kernel of a cascade takes."""

    #: CTAs of the grid and of a cluster, threads of a CTA.
    ctas: int
    cluster: int
    threads: int
    #: CTAs that an SM holds at once.
    side: int
    #: Per thread, estimated; for tiles only those of scores and sums.
    registers: int
    #: Per CTA, at least.
    shared_bytes: int
    #: Rounds of CTAs that the device makes: a fraction, 1 at least.
    waves: float


class CascadeFamily(ABC, Generic[T, W]):
    """Kernels of a cascade in tiles `T`, a frozen dataclass; an instance is of one cascade.

    `W` is what is counted of it, one of `streams`.
    """

    #: As plans and candidates name it.
    name: ClassVar[str]
    #: What it is, in a few words, and as the head of an explanation.
    text: ClassVar[str]
    form: ClassVar[str]
    #: The schedule rule ``schedule_NAME``, see `of_rules`; ``planned_NAME`` writes a plan's kernel.
    rule: ClassVar[str]
    #: The type of the tiles.
    kind: ClassVar[Any]
    # Of which cascades there are kernels: see `matches`.
    #: What becomes of the axis: a stream of threads, of tiles with products, or either.
    streams: ClassVar[Any] = (Work, TileWork)
    #: Products that load the rows which they make, and whether one follows a stream of tiles.
    of_rows: ClassVar[int] = 0
    followed: ClassVar[bool] = False
    #: Whether rows are added up.
    adds_rows: ClassVar[bool] = False
    #: Fields of the tiles that are searched, the others being chosen with them; and those of them
    #: that a crossover takes from the other parent.
    axes: ClassVar[tuple[str, ...]]
    second: ClassVar[tuple[str, ...]]
    #: Plans at most; 0 for all.
    most: ClassVar[int] = 0
    #: Words of the place of states, by the names of placements that are among all kernels.
    state_places: ClassVar[Mapping[str, str]] = {}

    def __init__(self, shape: CascadeShape) -> None:
        self.shape = shape

    @property
    def work(self) -> W:
        """What is counted of the cascade."""
        return cast(W, self.shape.work)

    @classmethod
    def summary(cls) -> str:
        """What it is, and the rule that writes its kernels."""
        return f"{cls.text}: {cls.rule.rpartition('.')[2]}"

    @classmethod
    def matches(cls, shape: CascadeShape) -> bool:
        """Whether there may be kernels of a cascade."""
        behind = shape.rows_products == cls.of_rows and (shape.after is not None) == cls.followed
        behind = behind and bool(shape.sums) == cls.adds_rows
        return behind and isinstance(shape.work, cls.streams)

    @abstractmethod
    def candidates(self, device: Device) -> tuple[Steps, tuple[T, ...]]:
        """List tiles that keep all rules, and how many tiles each rule leaves."""

    @abstractmethod
    def time(self, tiles: T, device: Device, rates: Rates) -> Estimate:
        """Estimate one kernel, without a user's own terms; its tiles must keep the rules."""

    @property
    def equal(self) -> float:
        """Estimates whose ratio is less than this are equal."""
        return 1.01

    @abstractmethod
    def preference(self, time: float, tiles: T) -> tuple[float, ...]:
        """Order tiles of equal times, the most usual first."""

    def ordered(self, times: Sequence[Timed[T]]) -> list[Timed[T]]:
        """Sort tiles by their times, the best first; of equal ones the most usual."""
        best = min((time for time, _ in times), default=1.0)

        def key(pair: Timed[T]) -> tuple[float, ...]:
            beyond = int(log(pair[0] / best) / log(self.equal) + 1e-9)
            return (beyond, *self.preference(*pair))

        return sorted(times, key=key)

    @abstractmethod
    def moved(self, tiles: T, device: Device) -> dict[str, int]:
        """Bytes that one kernel moves by level."""

    @abstractmethod
    def place_of(self, tiles: T) -> str:
        """Describe where states and elements are stored, in words that tell kernels apart.

        States of a CTA are in registers, those of a cluster go through DSM, those that a second
        kernel merges through global memory. Elements that outputs over the axis need again are in
        registers or shared memory, or come from L2 as far as it has them.
        """

    @abstractmethod
    def taken(self, tiles: T, device: Device) -> Taken:
        """Resources of the device that a kernel takes."""

    @abstractmethod
    def computed(self, tiles: T) -> dict[str, int]:
        """Operations of products, and instructions beside them, by level of explanations."""

    @classmethod
    def schedule(cls, site: Site, derivation: Derivation, tiles: T, *, constant: bool) -> Any:
        """Write and schedule a cascade; `constant` weights are written by no running kernel."""
        return of_rules(cls.rule.replace("schedule_", "planned_"))(
            site, derivation, tiles, constant
        )

    def kernels(self, tiles: T) -> tuple[str, ...]:
        """Name the launched kernels."""
        return (self.name,)

    def parted(self, place: str, device: Device, rates: Rates) -> tuple[T, ...]:
        """Order tiles whose states merge in a place, where `candidates` share no axis."""
        return ()

    def runners(self, found: Sequence[T], device: Device, rates: Rates) -> tuple[T, ...]:
        """Tiles to compare those that were found with, which are never chosen."""
        return ()

    def apart(self, device: Device, rates: Rates) -> Estimate | None:
        """Estimate kernels of ours one after another, if there are such; without own terms."""
        return None

    def at_most(self, keep: int) -> int | None:
        """Plans that are made where `keep` are asked for, 0 for all; None: all that there are."""
        return min(keep or self.most, self.most) or None

    def estimate(self, tiles: T, device: Device, rates: Rates) -> Estimate:
        """Estimate one kernel, with a user's own terms; its tiles must keep the rules."""
        found = self.time(tiles, device, rates)
        return rates.with_own(found, CascadeKernel(self, tiles), self.shape, device)

    def timed(self, device: Device, rates: Rates) -> tuple[Steps, tuple[Timed[T], ...]]:
        """Time all tiles, the best first; also how many tiles each rule leaves."""
        steps, found = self.candidates(device)
        return steps, tuple(self.ordered(self.times(found, device, rates)))

    def times(self, tiles: Sequence[T], device: Device, rates: Rates) -> list[Timed[T]]:
        """Estimate kernels one by one."""
        return [(float(self.estimate(e, device, rates).microseconds), e) for e in tiles]

    def in_order(self, device: Device, rates: Rates) -> tuple[Steps, tuple[T, ...]]:
        """Order all tiles, the best first; also how many tiles each rule leaves."""
        steps, found = self.timed(device, rates)
        return steps, tuple(tiles for _, tiles in found)

    @classmethod
    def fields(cls, tiles: T) -> dict[str, Any]:
        """Fields of tiles as plans and candidates name them."""
        return asdict(tiles)  # type: ignore[call-overload]

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> T:
        """Make tiles of their fields; those left out are as in the class, others are refused."""
        try:
            made: T = typed(cls.kind, given)
        except Damaged as error:
            raise refuse(
                PlanRefused,
                "tiles",
                f"family '{cls.name}'",
                found=error.found,
                limit=error.limit,
                instead="name tile extents like these",
            ) from None
        return made


@dataclass(frozen=True)
class CascadeKernel:
    """A kernel of a cascade, as a user's own terms see it (`crossfuse.planner.cost.terms`)."""

    of: CascadeFamily[Any, Any]
    #: Of one candidate; those of rows before a product may be of many, with arrays as fields.
    tiles: Any

    @property
    def family(self) -> str:
        """``"stream"``, ``"tiles"`` or ``"rows"``."""
        return self.of.name

    def kernels(self, shape: CascadeShape) -> tuple[str, ...]:
        """Name the launched kernels, in the form of those of chains: see `TileKernel.kernels`."""
        return self.of.kernels(self.tiles)
