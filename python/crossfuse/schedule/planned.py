"""From a plan to a schedule: the rule of its family, with its tiles."""

from __future__ import annotations

from typing import Any

from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.planner.plan import Plan
from crossfuse.schedule.rules.cluster_tiles import ClusterTiles
from crossfuse.schedule.rules.clustered_ffn import schedule_clustered_ffn
from crossfuse.schedule.rules.register_ffn import schedule_register_ffn
from crossfuse.schedule.rules.register_tiles import RegisterTiles
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm


def schedule_planned(func: Any, plan: Plan, *, constant_weights: bool = False) -> Any:
    """Schedule a function as a plan says.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        The canonical function that the plan is of, see `crossfuse.workload.prim_func`.
    plan : Plan
        From `crossfuse.planner.plan.plan`.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the plan is not to fuse, or the function is not what it is of.
    """
    tiles, constant = plan.tiles, constant_weights
    if plan.family == "gemm":
        return schedule_tiled_gemm(func, tiles=TensorTiles(**tiles), constant_weights=constant)
    if plan.family in ("l2", "global"):
        first, second = (TensorTiles(**tiles[each]) for each in ("first", "second"))
        staged = plan.family == "l2"
        return schedule_tiled_ffn(
            func, first=first, second=second, staged=staged, constant_weights=constant
        )
    if plan.family == "dsm":
        return schedule_clustered_ffn(
            func, tiles=ClusterTiles(**tiles), constant_weights=constant, target=plan.device
        )
    if plan.family == "registers":
        return schedule_register_ffn(
            func, tiles=RegisterTiles(**tiles), constant_weights=constant, target=plan.device
        )
    raise refuse(
        ScheduleRefused,
        "plan",
        f"family '{plan.family}'",
        found=f"a plan of {plan.microseconds:.1f} us that leaves the chain to a library",
        limit="a plan of a kernel of ours",
        instead="call the library, or plan with only=('l2', 'dsm', 'registers', 'global')",
    )
