"""A function of a search as the kernels that compute it; a note in a trace names one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.facts import is_reduction
from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.meta_schedule.functions import name_of, tag
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.extract.chain import chain_from
from crossfuse.planner.families import EAGER
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.planner.plan import Plan, ranked
from crossfuse.planner.tune.kernel_space import KernelSpace, space_of
from crossfuse.schedule.notes import annotate_plan, note, read_note
from crossfuse.schedule.planned import schedule_planned
from crossfuse.schema import Damaged


@dataclass(frozen=True)
class Task:
    """One function and all of its kernels.

    Attributes
    ----------
    func : tvm.tirx.PrimFunc
        The function, unscheduled.
    chain : Chain
        What it computes.
    space : KernelSpace
        The kernels.
    """

    func: Any
    chain: Chain
    space: KernelSpace

    @cached_property
    def name(self) -> str:
        """See `crossfuse.meta_schedule.functions.name_of`."""
        return name_of(self.func)

    @cached_property
    def _frame(self) -> Plan:
        shape = self.space.shape
        device = self.space.device
        (found,) = ranked(self.chain, device, k_major=shape.k_major, only=(EAGER,))
        return found

    def schedule(self, point: int) -> Any:
        """Schedule one kernel.

        Parameters
        ----------
        point : int
            Of `space`.

        Returns
        -------
        tvm.s_tir.Schedule
            Its trace says which plan it is, and of which function.

        Raises
        ------
        ScheduleRefused
            If the rule does not take these tiles.
        """
        family, tiles = self.space.tiles(point)
        plan = replace(self._frame, family=family, tiles=tiles)
        sch = schedule_planned(self.func, plan, constant_weights=True)
        annotate_plan(sch, family, tiles)
        return tag(sch, self.name)

    def designs(self, count: int) -> list[Any]:
        """Schedule the best kernels of each family.

        Parameters
        ----------
        count : int
            Kernels of each, by the estimate.

        Returns
        -------
        list[tvm.s_tir.Schedule]
            Those that the rules take: the planner counts what they take, but where the two differ,
            the rule is right.
        """
        found = []
        order = self.space.order
        for group in self.space.groups:
            inside = order[(order >= group.first) & (order < group.first + group.size)]
            for point in inside[:count]:
                with suppress(RefusedError):
                    found.append(self.schedule(int(point)))
        return found

    def point(self, trace: Any) -> int | None:
        """The kernel that a trace says it is.

        Parameters
        ----------
        trace : tvm.s_tir.schedule.Trace
            Of a schedule, or of a record.

        Returns
        -------
        int | None
            None where it says nothing, or names no kernel of the space.
        """
        text = note(trace)
        if text is None:
            return None
        try:
            said = read_note(text)
            return self.space.find(said.family, said.tiles)
        except (Damaged, KeyError, TypeError):
            return None


def task_of(func: Any, target: Device) -> Task:
    """Read a function.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc | tvm.IRModule
        Unscheduled; of a module its only function.
    target : Device
        Where kernels are to run.

    Raises
    ------
    PlanRefused
        If it is no chain, or there are no kernels of it: the reason.
    """
    if isinstance(func, ir.tvm.IRModule):
        (func,) = func.functions.values()
    chain = chain_from(func)
    shape = shape_of(chain, k_major=is_k_major(func))
    return Task(func, chain, space_of(shape, target, rates_of(target)))


def is_k_major(func: Any) -> bool:
    """Whether the first weights are stored as [n, k]: what is summed over lies side by side.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A chain of products.
    """
    sch = ir.Schedule(func)
    for handle in sch.get_child_blocks(sch.get_sblock("root")):
        block = sch.get(handle)
        summed = [each.var for each in block.iter_vars if is_reduction(each)]
        if not summed:
            continue
        column = block.writes[0].region[-1].min
        for read in block.reads:
            indices = [each.min for each in read.region]
            if any(each.same_as(column) for each in indices):
                return any(indices[-1].same_as(each) for each in summed)
    return True


class Tasks:
    """Functions that a search has met: reading one and listing its kernels takes a while.

    Parameters
    ----------
    target : Device
        Where kernels are to run.
    """

    def __init__(self, target: Device) -> None:
        self.target = target
        #: All functions that were met, by `crossfuse.meta_schedule.functions.name_of`.
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
