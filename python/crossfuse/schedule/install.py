"""Puts the primitives on `tvm.s_tir.Schedule`, as methods beside TVM's own.

It imports nothing of the project: TVM calls it in the middle of ``import tvm``, which may itself
be in the middle of an import of ours.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Method name -> module that defines the function of that name.
PRIMITIVES = {
    "cluster_bind": "crossfuse.schedule.cluster_bind",
    "dsm_reduce": "crossfuse.schedule.dsm_reduce",
    "dsm_shuffle": "crossfuse.schedule.dsm_shuffle",
    "grid_stage": "crossfuse.schedule.grid_stage",
    "accept_fewer_rows": "crossfuse.schedule.accept_fewer_rows",
    "verify_cluster": "crossfuse.schedule.verify_cluster",
    "cluster_layout": "crossfuse.schedule.cluster_layout",
}


class _Lazy:
    """A method that is loaded when it is first looked up, and then takes its own place."""

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
