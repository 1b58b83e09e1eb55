"""The parts of a search that belong together, as arguments of ``tune_tir`` and ``tune_relax``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crossfuse.calls import Seed, Whole, checked
from crossfuse.hardware import Device, device
from crossfuse.planner.tune.cost_model import CostModel

if TYPE_CHECKING:
    from crossfuse.meta_schedule.task import Tasks


@checked
def plugs(
    target: str | Device | None = None,
    *,
    strategy: str = "evolution",
    model: CostModel | None = None,
    designs: Whole = 4,
    others: Any = None,
    seed: Seed = 0,
    tasks: Tasks | None = None,
) -> dict[str, Any]:
    """Make a space generator, a search strategy and a cost model that share what they learn.

    Parameters
    ----------
    target : str | Device | None
        Where kernels are to run.
    strategy : str
        One of `crossfuse.planner.tune.strategy.STRATEGIES`.
    model : CostModel | None
        What was learned before.
    designs : int
        Kernels of each family that are designs.
    others : SearchStrategy | None
        For functions that are no chain; None for TVM's ``evolutionary``.
    seed : int
        The same seed and measurements give the same search.
    tasks : Tasks | None
        Where functions that are met are kept, for `crossfuse.meta_schedule.builder.NvccBuilder`.

    Returns
    -------
    dict[str, Any]
        ``space``, ``strategy`` and ``cost_model``.

    Examples
    --------
    >>> sorted(plugs("nvidia-h100", seed=1))  # arguments of `tvm.s_tir.meta_schedule.tune_tir`
    ['cost_model', 'space', 'strategy']
    """
    from crossfuse.meta_schedule.builder import import_intrinsics
    from crossfuse.meta_schedule.search import KernelCost, KernelSearch
    from crossfuse.meta_schedule.task import FusedSpace, Tasks

    import_intrinsics()
    tasks = Tasks(device(target)) if tasks is None else tasks
    learned = CostModel(seed) if model is None else model
    return {
        "space": FusedSpace(tasks, designs=designs, seed=seed),
        "strategy": KernelSearch(tasks, strategy, learned, others=others, seed=seed),
        "cost_model": KernelCost(tasks, learned),
    }
