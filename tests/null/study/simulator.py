"""A walk through the loop nest, tile by tile, that counts what the formulas of `volume` say.

It knows no rule. It runs the last product; a product whose left operand is not there has it made
first, by the product before. Each tensor has one buffer, in each unit of the level, with what its
hold says. What is not in the buffer is moved, element by element of the ranges that units have.
Slow, for tests and small chains.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product as combinations
from math import prod

from crossfuse.planner.chain.spec import Chain, Tensor
from study.dataflow.movement import further_loops
from study.dataflow.published import LoopSchedule
from study.dataflow.schedules import Residency
from study.dataflow.tiling import Tiling, grains

_Steps = dict[str, int]


@dataclass
class Walk:
    """A run of a chain at one level.

    Attributes
    ----------
    chain, schedule, tiling, residency
        What runs.
    level : str
        Whose units have the buffers.
    pieces : dict[str, int]
        What an instruction takes along a dim that does not index an operand; 1 where absent.
    moved : Counter[str]
        Elements by tensor that came, or of the output that left, after `run`.
    again : Counter[str]
        Those of them that the unit had had before.
    made : Counter[str]
        Elements by result that units had sums of, whole ones or shares.
    read : Counter[str]
        Elements by operand that instructions read.
    largest : Counter[str]
        Most elements that a unit had at once.
    """

    chain: Chain
    schedule: LoopSchedule
    tiling: Tiling
    residency: Residency
    level: str
    pieces: dict[str, int] = field(default_factory=dict)
    moved: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)
    made: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)
    largest: Counter[str] = field(default_factory=Counter)

    def run(self) -> Walk:
        """Run the chain once."""
        self._views = grains(self.chain, self.schedule, self.tiling)[self.level]
        self._buffer: dict[str, tuple[int, ...]] = {}
        self._seen: dict[str, set[tuple[int, ...]]] = {}
        self._execute(len(self.chain.products) - 1, {})
        return self

    def _execute(self, index: int, fixed: _Steps) -> None:
        """Run a product for the steps that its consumer is at."""
        own = self.chain.loops(index)
        free = [dim for dim in self.schedule.order if dim in own and dim not in fixed]
        product = self.chain.products[index]
        for values in combinations(*(range(int(self._views[index][dim].steps)) for dim in free)):
            at = {**fixed, **dict(zip(free, values, strict=True))}
            for name in (product.left, *product.rights, product.output):
                tensor = self.chain.tensor(name)
                result = name == product.output
                if result and not at.get(product.reduction, 0):
                    units = self._regions(index, tensor, at, len(self.schedule.order))
                    self.made[name] += sum(units) * self._copies(index)
                if result and tensor.role == "intermediate":
                    continue
                if not result:
                    copies = 1 if name != product.left else len(product.rights)
                    self.read[name] += copies * self._instructions(index, tensor, at)
                self._touch(index, tensor, at)
            self._read_further(index, at)

    def _read_further(self, index: int, at: _Steps) -> None:
        """Read what the epilogue reads when a sum is whole, and what goes with operands always."""
        product = self.chain.products[index]
        last = int(self._views[index][product.reduction].steps) - 1
        for name in product.further:
            tensor = self.chain.tensor(name)
            if product.reduction in tensor.dims or at.get(product.reduction, last) == last:
                self._touch(index, tensor, at, further_loops(self.chain, index, name))

    def _touch(
        self, index: int, tensor: Tensor, at: _Steps, loops: tuple[str, ...] | None = None
    ) -> None:
        """Have a tensor's region in the buffer, in the units that stand along `loops`."""
        hold = self.residency.position(tensor, self.schedule)
        outside = [dim for dim in self.schedule.order[:hold] if dim in tensor.dims]
        key = tuple(at[dim] for dim in outside)
        if self._buffer.get(tensor.name) == key:
            return
        self._buffer[tensor.name] = key
        units = self._regions(index, tensor, at, hold, loops)
        self.moved[tensor.name] += sum(units) * self._copies(index)
        self.largest[tensor.name] = max(self.largest[tensor.name], *units)
        seen = self._seen.setdefault(tensor.name, set())
        self.again[tensor.name] += sum(units) * self._copies(index) * (key in seen)
        seen.add(key)
        if tensor.role == "intermediate":
            self._execute(index - 1, {dim: at[dim] for dim in outside})

    def _regions(
        self,
        index: int,
        tensor: Tensor,
        at: _Steps,
        hold: int,
        loops: tuple[str, ...] | None = None,
    ) -> list[int]:
        """Elements of a tensor's region in each unit along the dims of a product, or along some."""
        sizes = []
        for dim in loops or self.chain.loops(index):
            step = None if self.schedule.position(dim) >= hold else at.get(dim, 0)
            lanes = [self._iterations(index, dim, lane, step) for lane in self._lanes(index, dim)]
            indexed = dim in tensor.dims
            sizes.append(
                [self._length(index, dim, each) if indexed else bool(each) for each in lanes]
            )
        return [prod(unit) for unit in combinations(*sizes)]

    def _instructions(self, index: int, tensor: Tensor, at: _Steps) -> int:
        """Elements of an operand that the instructions of all units read in one step."""
        sizes = []
        for dim in self.chain.loops(index):
            lanes = [
                self._iterations(index, dim, lane, at.get(dim, 0))
                for lane in self._lanes(index, dim)
            ]
            piece = 1 if dim in tensor.dims else self.pieces.get(dim, 1)
            sizes.append([len(range(0, len(each), piece)) for each in lanes])
        return sum(prod(unit) for unit in combinations(*sizes)) * self._copies(index)

    def _lanes(self, index: int, dim: str) -> range:
        return range(int(self._views[index][dim].lanes))

    def _iterations(self, index: int, dim: str, lane: int, step: int | None) -> list[int]:
        """Iterations of a dim that a lane has in a step, or in all steps."""
        grain = self._views[index][dim]
        steps = range(int(grain.steps)) if step is None else (step,)
        starts = [(each * int(grain.lanes) + lane) * int(grain.tile) for each in steps]
        present = [range(each, each + int(grain.tile)) for each in starts]
        return [each for some in present for each in some if each < grain.extent]

    def _length(self, index: int, dim: str, present: list[int]) -> int:
        return len(present)

    def _copies(self, index: int) -> int:
        """Clusters that each run a product for columns of their own of a later one."""
        copies = 1
        for dim in self.schedule.spatial:
            if dim not in self.chain.loops(index) and self._demands(index, dim):
                copies *= int(self._views[index][dim].tiles)
        return copies

    def _demands(self, index: int, dim: str) -> bool:
        """Whether the consumers of a product stand along a dim, each with a result of its own."""
        if index == len(self.chain.products) - 1:
            return False
        if self.chain.products[index].output in self.residency.grid_wide:
            return False
        return dim in self.chain.loops(index + 1) or self._demands(index + 1, dim)
