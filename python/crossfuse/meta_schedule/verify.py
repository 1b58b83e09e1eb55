"""Postprocs of MetaSchedule: one that lowers schedules of ours, one that passes them by."""

from __future__ import annotations

from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.postproc import PyPostproc

from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.schedule.notes import note


@derived_object
class VerifyLowered(PyPostproc):
    """Accepts kernels of ours that lower: shared memory, registers and clusters are known then.

    Nothing is compiled. TVM's own ``VerifyGPUCode`` reads the schedule before shared memory is
    divided among the CTAs of a cluster, and counts too much. Schedules that are not of a plan pass.

    Parameters
    ----------
    target : Device
        Whose limits hold.
    """

    def __init__(self, target: Device) -> None:
        super().__init__()
        self._target = target
        #: Why the last schedule was turned down; empty where it was not.
        self.reason = ""

    def _initialize_with_tune_context(self, context: Any) -> None:
        pass

    def apply(self, sch: Any) -> bool:
        """Whether the schedule lowers.

        Parameters
        ----------
        sch : tvm.s_tir.Schedule
            Of one function.
        """
        from crossfuse.lower.extract import lower

        self.reason = ""
        if note(sch.trace) is None:
            return True
        try:
            lower(sch.mod, self._target)
        except RefusedError as error:
            self.reason = str(error)
        return not self.reason

    def clone(self) -> Any:
        """A check of the same device."""
        return VerifyLowered(self._target)


@derived_object
class ForOthers(PyPostproc):
    """A postproc of TVM that leaves kernels of ours alone.

    Parameters
    ----------
    inner : tvm.s_tir.meta_schedule.Postproc
        For schedules that are not of a plan.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner

    def _initialize_with_tune_context(self, context: Any) -> None:
        self._inner._initialize_with_tune_context(context)

    def apply(self, sch: Any) -> bool:
        """Whether the schedule is of a plan, or passes.

        Parameters
        ----------
        sch : tvm.s_tir.Schedule
            Of one function.
        """
        return note(sch.trace) is not None or bool(self._inner.apply(sch))

    def clone(self) -> Any:
        """The same for a copy of the inner one."""
        return ForOthers(self._inner.clone())
