"""Tile extents of chains whose intermediate lies in parts: given by the caller, or chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, TypeVar

from crossfuse.blocks.chain import Chain
from crossfuse.blocks.scheduled import name_of
from crossfuse.calls import checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.families.dsm import SLICE, ClusteredKernel
from crossfuse.planner.families.registers import REGISTERS, STEP, RegisterKernel
from crossfuse.planner.kernels.shape import Flag, shape_of_blocks
from crossfuse.schema import Tile

Tiles = TypeVar("Tiles", bound="PartedTiles")


class PartedTiles(ABC):
    """Tiles of one launch, as dataclasses of the rule's extents. Zero means: choose."""

    #: The planner's kernels of these tiles.
    kind: ClassVar[type[ClusteredKernel] | type[RegisterKernel]]
    #: Name of the rule in refusals.
    rule: ClassVar[str]
    #: Alternative that refusals suggest where no division fits.
    instead: ClassVar[str]
    #: Parts of the intermediate's columns.
    parts: int
    #: Stages in shared memory; 0 for as many as fit.
    stages: int

    @property
    @abstractmethod
    def kernel(self) -> ClusteredKernel | RegisterKernel:
        """The planner's kernel of the same tiles, which computes their widths."""

    @abstractmethod
    def limit(self, chain: Chain) -> str:
        """Requirements on tiles of a chain, for refusals."""

    def leaves_room(self, chain: Chain, kernels: Any) -> Flag:
        """Which of many legal kernels may be chosen."""
        return True

    def complete(self: Tiles, sch: Any, chain: Chain, device: Device) -> Tiles:
        """Choose the sizes that the caller left open: the fastest by the planner's estimate.

        The schedule is for messages. Refused if no division fits.
        """
        from crossfuse.planner.cost.estimate import fill_tiles

        wanted = asdict(self)  # type: ignore[call-overload]
        given = {name: each for name, each in wanted.items() if each and name != "stages"}
        found = fill_tiles(
            self.kind,
            shape_of_blocks(chain),
            device,
            given,
            lambda kernels: self.leaves_room(chain, kernels),
        )
        if found is None:
            raise refuse(
                ScheduleRefused,
                self.rule,
                name_of(sch, chain.second),
                found=f"{chain.n} columns of the intermediate and {chain.l} of the output, "
                f"for {self}{chain.narrow}",
                limit=self.limit(chain),
                instead=self.instead,
            )
        return replace(self, **found.tiles())  # type: ignore[type-var]

    def width(self, chain: Chain) -> int:
        """Columns of the intermediate that a CTA makes; the last ones may reach beyond it."""
        return int(self.kernel.width(shape_of_blocks(chain)))

    def rows_of_sum(self, chain: Chain) -> int:
        """Rows of a tile of which each part adds as many elements, through L2.

        Rows beyond the output are added by nobody.
        """
        return int(self.kernel.rows_of_sum(shape_of_blocks(chain)))


# Of an intermediate that stays in a cluster.


@checked
@dataclass(frozen=True)
class ClusterTiles(PartedTiles):
    """How a chain is divided over clusters. Zero means: choose."""

    kind: ClassVar[type[ClusteredKernel]] = ClusteredKernel
    rule: ClassVar[str] = "cluster-tiles"
    instead: ClassVar[str] = "leave tiles open, or keep the intermediate in L2 (schedule_tiled_ffn)"
    #: Rows of a cluster's tile: 64 for each warpgroup that multiplies.
    rows: Tile = 0
    #: CTAs of a cluster: each makes a slice of the intermediate and of the output.
    cluster: Tile = 0
    #: Parts of the intermediate's columns, which different clusters make.
    parts: Tile = 0
    #: Stages in shared memory; 0 for as many as fit.
    stages: Tile = 0

    def limit(self, chain: Chain) -> str:
        """Requirements on tiles of a chain, for refusals."""
        return (
            f"clusters with slices of multiples of {SLICE} and 8 columns that find room at "
            "the same time, and parts that each have some; elements of 16 bits"
        )

    @property
    def kernel(self) -> ClusteredKernel:
        """The planner's kernel of the same tiles, which computes their widths."""
        return ClusteredKernel(self.rows, self.cluster, self.parts)

    def share(self, chain: Chain) -> int:
        """Columns of the intermediate that a cluster makes."""
        return self.cluster * self.width(chain)

    def columns(self, chain: Chain) -> int:
        """Columns of a CTA's tile of the output; the last one may reach beyond it."""
        return int(self.kernel.columns(shape_of_blocks(chain)))

    def pads(self, chain: Chain) -> bool:
        """Whether slices reach beyond the intermediate."""
        return self.parts * self.share(chain) > chain.n


# Of an intermediate that stays in registers.

#: Registers for the intermediate and the sums that it is made of, where the rule chooses: a long
#: epilogue needs some more.
_MAKING = 160


@checked
@dataclass(frozen=True)
class RegisterTiles(PartedTiles):
    """How a chain is divided over CTAs. Zero means: choose."""

    kind: ClassVar[type[RegisterKernel]] = RegisterKernel
    rule: ClassVar[str] = "register-tiles"
    instead: ClassVar[str] = (
        "leave tiles open, or keep the intermediate in the cluster (schedule_clustered_ffn) or in "
        "L2 (schedule_tiled_ffn)"
    )
    #: Rows of a CTA's tiles: 64 for each warpgroup that multiplies.
    rows: Tile = 0
    #: Columns of a tile of the output. Each CTA makes the intermediate that it needs: where several
    #: tiles stand side by side, it is made several times.
    columns: Tile = 0
    #: Parts of the intermediate's columns, which different CTAs make.
    parts: Tile = 0
    #: 1: the parts are summed through L2. As many as parts: they are the CTAs of a cluster, which
    #: sum them through DSM.
    cluster: Tile = 0
    #: Stages in shared memory; 0 for as many as fit.
    stages: Tile = 0

    def limit(self, chain: Chain) -> str:
        """Requirements on tiles of a chain, for refusals."""
        return (
            f"parts of a multiple of {STEP} columns, each with some of them, of at most "
            f"{256 // len(chain.first)} (a single part: all of them), and tiles of the output "
            f"of a multiple of 8 that together take {REGISTERS} registers a thread; parts "
            "that all find room at the same time, or that are the CTAs of a cluster and have "
            "as many rows of a tile each; elements of 16 bits"
        )

    def leaves_room(self, chain: Chain, kernels: RegisterKernel) -> Flag:
        """Whether chosen numbers of parts leave registers for an epilogue of any length."""
        column = len(chain.first) / 2 + 1 / 4
        return bool(self.parts) | (column * chain.n <= _MAKING * kernels.parts)

    @property
    def kernel(self) -> RegisterKernel:
        """The planner's kernel of the same tiles, which computes their widths."""
        return RegisterKernel(self.rows, self.columns, self.parts, self.cluster)
