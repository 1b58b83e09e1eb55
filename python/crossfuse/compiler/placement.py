"""Where the intermediate of a chain lives in kernels of the Hopper pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, prod
from typing import TYPE_CHECKING, Any

from crossfuse.errors import ScheduleRefused
from crossfuse.hardware import Device

if TYPE_CHECKING:
    from crossfuse.schedule.rules.cluster_tiles import ClusterTiles
    from crossfuse.schedule.rules.register_tiles import RegisterTiles

#: Names that `compile` takes.
PLACEMENTS = ("auto", "registers", "dsm", "dsm-unordered", "l2", "global", "planned")
#: Bytes of a function's tensors below which registers may win over the shared memory of a cluster,
#: and microseconds that making the intermediate several times may cost there: an exchange costs
#: more than its bytes. Measured on an H100, docs/hopper-measured.md.
_REGISTER_BYTES, _EXCHANGE = 3 << 20, 2.5
#: Bytes of a function's tensors below which the shared memory of a cluster wins over L2: there the
#: way through L2 costs more than the partial sums of several clusters. Measured on an H100,
#: docs/hopper-measured.md.
_DSM_BYTES = 6 << 20


def tensor_options(
    func: Any, cluster: int, placement: str, constant: bool, target: Device
) -> list[Callable[[], Any]]:
    """Ways to schedule a canonical function for the Hopper pipeline, the best one first.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        The function.
    cluster : int
        CTAs of a cluster; 0 leaves it to the rule.
    placement : str
        One of `PLACEMENTS` but ``"planned"``.
    constant : bool
        Whether no kernel that may still be running writes the weights.
    target : Device
        What to schedule for.

    Returns
    -------
    list[Callable]
        Each makes a schedule, or refuses.
    """
    from crossfuse import _tvm as ir
    from crossfuse.schedule.rules.chain import read_chain
    from crossfuse.schedule.rules.cluster_tiles import ClusterTiles
    from crossfuse.schedule.rules.clustered_ffn import schedule_clustered_ffn
    from crossfuse.schedule.rules.register_ffn import schedule_register_ffn
    from crossfuse.schedule.rules.register_tiles import RegisterTiles
    from crossfuse.schedule.rules.tensor_tiles import TensorTiles
    from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
    from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm

    tiles = TensorTiles(cluster=cluster)
    if read_chain(ir.Schedule(func)).second is None:
        return [partial(schedule_tiled_gemm, func, tiles=tiles, constant_weights=constant)]
    staged = partial(
        schedule_tiled_ffn, func, first=tiles, constant_weights=constant, target=target
    )
    rules = {
        "registers": partial(
            schedule_register_ffn,
            func,
            tiles=RegisterTiles(cluster=cluster),
            constant_weights=constant,
            target=target,
        ),
        "dsm": partial(
            schedule_clustered_ffn,
            func,
            tiles=ClusterTiles(cluster=cluster),
            constant_weights=constant,
            target=target,
        ),
        "l2": partial(staged, staged=True),
        "global": partial(staged, staged=False),
    }
    rules["dsm-unordered"] = partial(rules["dsm"], unordered=True)
    places = _places(func, target) if placement == "auto" else (placement,)
    return [rules[each] for each in places]


def _places(func: Any, target: Device) -> tuple[str, ...]:
    """Where an intermediate may live, the best place first."""
    from crossfuse.lower.extract import buffer_specs
    from crossfuse.runtime.launcher import DTYPES

    size = sum(prod(each.shape) * DTYPES[each.dtype][1] // 8 for each in buffer_specs(func))
    if size >= _DSM_BYTES:
        return ("l2", "global", "dsm")
    first = ("registers",) if size < _REGISTER_BYTES and _registers_win(func, target) else ()
    return (*first, "dsm", "l2", "global")


def _registers_win(func: Any, target: Device) -> bool:
    """Whether a chain is faster in registers than in the shared memory of a cluster."""
    from crossfuse import _tvm as ir
    from crossfuse.schedule.rules.chain import read_chain
    from crossfuse.schedule.rules.cluster_tiles import ClusterTiles
    from crossfuse.schedule.rules.register_tiles import RegisterTiles

    sch = ir.Schedule(func)
    chain = read_chain(sch)

    def time(tiles: ClusterTiles | RegisterTiles) -> float:
        try:
            return tiles.complete(sch, chain, target).microseconds(chain, target)
        except ScheduleRefused:
            return inf

    return time(RegisterTiles()) < time(ClusterTiles()) + _EXCHANGE
