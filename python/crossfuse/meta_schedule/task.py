"""A function of a search and the kernels that compute it; a note in a trace names one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.bench.problem import name_of, tag
from crossfuse.blocks.chain import read_layers
from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.meta_schedule.database import FAILED_SECONDS
from crossfuse.planner.chain.build import chain_of_blocks
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families import EAGER
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.planner.plan import Plan, ranked
from crossfuse.planner.tune.kernel_space import KernelSpace, space_of
from crossfuse.schedule.planned import schedule_planned
from crossfuse.schedule.records import annotate_plan, note, read_note
from crossfuse.schema import Damaged


@dataclass(frozen=True)
class Task:
    """One function and all of its kernels."""

    #: The ``tvm.tirx.PrimFunc``, unscheduled.
    func: Any
    chain: Chain
    space: KernelSpace

    @cached_property
    def name(self) -> str:
        """Name of the function, see `crossfuse.bench.problem.name_of`."""
        return name_of(self.func)

    @cached_property
    def _frame(self) -> Plan:
        shape = self.space.shape
        device = self.space.device
        (found,) = ranked(self.chain, device, k_major=shape.k_major, only=(EAGER,))
        return found

    def schedule(self, point: int) -> Any:
        """Schedule one kernel, a point of `space`; its trace names the plan and the function.

        It is refused if the rule does not take these tiles.
        """
        family, tiles = self.space.tiles(point)
        plan = replace(self._frame, family=family, tiles=tiles)
        sch = schedule_planned(self.func, plan, constant_weights=True)
        annotate_plan(sch, family, tiles)
        return tag(sch, self.name)

    def designs(self, count: int) -> list[Any]:
        """Schedule the best `count` kernels of each family by the estimate.

        The planner counts kernels that the rules should take; where the two differ, the rule is
        right, and the kernel is left out.
        """
        found = []
        for group in self.space.groups:
            for point in self.space.ranked(group, count):
                with suppress(RefusedError):
                    found.append(self.schedule(point))
        return found

    def point(self, trace: Any) -> int | None:
        """The kernel that a trace's note names; None without a note or such a kernel."""
        text = note(trace)
        if text is None:
            return None
        try:
            said = read_note(text)
            return self.space.find(said.family, said.tiles)
        except (Damaged, KeyError, TypeError):
            return None

    def measured(
        self, candidates: Sequence[Any], results: Sequence[Any]
    ) -> tuple[list[int], list[float | None]]:
        """Points and microseconds of MetaSchedule's candidates; those that name none are left out.

        A time is None if there is just an error.
        """
        known = [
            (point, microseconds_of(result.run_secs))
            for each, result in zip(candidates, results, strict=True)
            if (point := self.point(each.sch.trace)) is not None
        ]
        return [point for point, _ in known], [time for _, time in known]


def microseconds_of(seconds: Any) -> float | None:
    """Mean time of a result in seconds; None where it failed."""
    if not seconds:
        return None
    mean = sum(float(each) for each in seconds) / len(seconds)
    return mean * 1e6 if math.isfinite(mean) and mean < FAILED_SECONDS / 2 else None


def task_of(func: Any, target: Device) -> Task:
    """Read an unscheduled function, or the only one of a module.

    It is refused if it is no chain, or there are no kernels of it.
    """
    from crossfuse.lower.extract import only_function

    func = only_function(func)
    read = read_layers(ir.Schedule(func))
    chain = chain_of_blocks(read)
    shape = shape_of(chain, k_major=read.k_major)
    return Task(func, chain, space_of(shape, target, rates_of(target)))


class Tasks:
    """Functions that a search has met, since reading one and listing its kernels takes a while."""

    def __init__(self, target: Device) -> None:
        self.target = target
        #: All functions that were met, by `crossfuse.bench.problem.name_of`.
        self.functions: dict[str, Any] = {}
        self._known: dict[str, Task | RefusedError] = {}

    def of(self, module: Any) -> Task | None:
        """The task of a module of one function; None where no kernel of ours computes it."""
        found = self.look(module)
        return found if isinstance(found, Task) else None

    def look(self, module: Any) -> Task | RefusedError:
        """The task of a module, or why there is none."""
        text = str(module.script())
        if text not in self._known:
            self.functions[name_of(module)] = module
            try:
                self._known[text] = task_of(module, self.target)
            except RefusedError as error:
                self._known[text] = error
        return self._known[text]
