"""Puts the primitives on `tvm.s_tir.Schedule`, as methods beside TVM's own.

`install` imports nothing of the project: TVM calls it in the middle of ``import tvm``, which may
itself be in the middle of an import of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from crossfuse.calls import checked

F = TypeVar("F", bound=Callable[..., Any])

#: Method name -> module that defines the function of that name.
PRIMITIVES = {
    "cluster_bind": "crossfuse.schedule.primitive",
    "dsm_reduce": "crossfuse.schedule.dsm_reduce",
    "dsm_shuffle": "crossfuse.schedule.dsm_shuffle",
    "grid_stage": "crossfuse.schedule.grid_stage",
    "accept_fewer_rows": "crossfuse.schedule.accept_fewer_rows",
    "rank_bind": "crossfuse.schedule.ranks",
    "rank_reduce": "crossfuse.schedule.ranks",
    "rank_gather": "crossfuse.schedule.ranks",
    "verify_cluster": "crossfuse.schedule.verify_cluster",
    "cluster_layout": "crossfuse.schedule.cluster_layout",
}


class _Lazy:
    """A method that is loaded on first use, and then replaced by the function itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        function = getattr(import_module(PRIMITIVES[self.name]), self.name)
        setattr(owner, self.name, function)
        return getattr(owner if instance is None else instance, self.name)


def install() -> None:
    """Install every primitive; calling it again changes nothing.

    A subclass of ``Schedule`` would lose its class across TVM's FFI (``sch.copy()`` returns the
    plain one), so the methods are set on the class itself.
    """
    from tvm.s_tir import Schedule

    for name in PRIMITIVES:
        if name not in vars(Schedule):
            setattr(Schedule, name, _Lazy(name))


@checked
def add_primitive(function: F) -> F:
    """Put a primitive of your own on ``tvm.s_tir.Schedule``, from outside this package.

    Composed of recorded instructions alone, it needs no registration anywhere else: its trace holds
    these, and replays where the primitive is not known.

    Parameters
    ----------
    function : Callable
        Of a schedule and further arguments; its name becomes that of the method.

    Returns
    -------
    Callable
        The same function, so that this is a decorator.

    Raises
    ------
    ScheduleRefused
        If schedules have something else of that name. Adding a function of the same module and name
        again replaces it, as running a cell of a notebook again does.

    Examples
    --------
    >>> import tvm
    >>> from crossfuse.workload import parse, prim_func
    >>> @add_primitive
    ... def halved(sch, loop):
    ...     return sch.split(loop, [2, None])
    >>> sch = tvm.s_tir.Schedule(prim_func(parse("gemm:M=32,K=64,N=32")))
    >>> len(sch.halved(sch.get_loops(sch.get_sblock("gemm0"))[0]))
    2
    """
    from tvm.s_tir import Schedule

    from crossfuse.errors import ScheduleRefused, refuse

    name = function.__name__
    there = vars(Schedule).get(name)
    same = getattr(there, "__module__", None) == function.__module__
    if name in PRIMITIVES or (hasattr(Schedule, name) and not same):
        raise refuse(
            ScheduleRefused,
            "add-primitive",
            f"function '{name}'",
            found="a method of tvm.s_tir.Schedule that has this name",
            limit="a name that schedules do not have yet",
            instead="give the function another name",
        )
    setattr(Schedule, name, function)
    return function
