"""Kinds of groups that kernels of products compute: how each is found, written and planned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse.hardware import Device
from crossfuse.measure.choice import FEW
from crossfuse.planner.plan import Plan
from crossfuse.relax.chains.groups import Group, find_groups
from crossfuse.relax.graph import Graph
from crossfuse.relax.outline import Outlined, outline
from crossfuse.relax.symbols import check_symbols
from crossfuse.schedule.planned import rank_function, schedule_planned

if TYPE_CHECKING:
    from crossfuse.planner.cascade.plan import CascadePlan


class Form(ABC):
    """A kind of groups."""

    #: What cached plans and kernels of it are filed under, with the function.
    name: ClassVar[str]

    @abstractmethod
    def find(self, graph: Graph) -> Iterator[Group]:
        """Find the groups of a graph that may be of this kind."""

    @abstractmethod
    def outlined(self, static: Any) -> Outlined:
        """A group of static shapes, a module of its own, as one function."""

    def check_rows(self, function: Any, rows: Any) -> None:
        """Refuse a group of symbolic rows in which symbols are more than a number of rows."""
        check_symbols(function, rows)

    @abstractmethod
    def ranked(self, func: Any, target: Device) -> Sequence[Plan | CascadePlan]:
        """Plans of a function, best first; at least one is of a kernel of ours."""

    @abstractmethod
    def read_plan(self, text: str) -> Plan | CascadePlan:
        """Read a plan of `ranked` from its JSON."""

    @abstractmethod
    def scheduled(self, func: Any, plan: Any, constant: bool) -> Any:
        """The function scheduled as a plan says."""


class Chains(Form):
    """Layers of products, each of which reads the one before it element by element."""

    name: ClassVar[str] = "chain"

    def find(self, graph: Graph) -> Iterator[Group]:
        """See `Form`."""
        return find_groups(graph)

    def outlined(self, static: Any) -> Outlined:
        """See `Form`."""
        return outline(static)

    def ranked(self, func: Any, target: Device) -> Sequence[Plan | CascadePlan]:
        """See `Form`."""
        return rank_function(func, target, keep=FEW)

    def read_plan(self, text: str) -> Plan | CascadePlan:
        """See `Form`."""
        return Plan.from_json(text)

    def scheduled(self, func: Any, plan: Any, constant: bool) -> Any:
        """See `Form`."""
        return schedule_planned(func, plan, constant_weights=constant)
