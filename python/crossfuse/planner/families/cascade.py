"""What a family of kernels of cascades says of itself, as `family.ChainFamily` does of chains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, cast

from crossfuse.cascade.rewrite.work import TileWork, Work
from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.families.family import of_rules
from crossfuse.planner.kernels.shape import Step
from crossfuse.schema import Damaged, typed

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.site import Site

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
    #: The schedule rule, see `of_rules`; its file has ``planned``, which writes a plan's kernel.
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
        module, _, _ = cls.rule.partition(".")
        return of_rules(f"{module}.planned")(site, derivation, tiles, constant)

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
    """A kernel of a cascade as a user's own terms see it: `crossfuse.planner.cost.own.OwnTerm`."""

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
