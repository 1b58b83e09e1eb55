"""Postprocs of MetaSchedule: one that lowers schedules of ours, one that lets them pass."""

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
    """

    def __init__(self, target: Device) -> None:
        super().__init__()
        self._target = target
        #: Why the last schedule was turned down; empty where it was not.
        self.reason = ""

    def _initialize_with_tune_context(self, context: Any) -> None:
        pass

    def apply(self, sch: Any) -> bool:
        """Whether the schedule of a function lowers within the device's limits."""
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
        """A check for the same device."""
        return VerifyLowered(self._target)


@derived_object
class ForOthers(PyPostproc):
    """A postproc of TVM that leaves kernels of ours alone.

    `inner` is applied to schedules that are not of a plan.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner

    def _initialize_with_tune_context(self, context: Any) -> None:
        self._inner._initialize_with_tune_context(context)

    def apply(self, sch: Any) -> bool:
        """Whether the schedule is of a plan, or passes the inner postproc."""
        return note(sch.trace) is not None or bool(self._inner.apply(sch))

    def clone(self) -> Any:
        """The same with a clone of the inner postproc."""
        return ForOthers(self._inner.clone())
