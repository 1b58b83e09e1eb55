"""The tiles that a rule chooses for a workload, in the planner's form."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import read_chain
from crossfuse.hardware import Device, device
from crossfuse.schedule.rules.cluster_tiles import ClusterTiles
from crossfuse.schedule.rules.register_tiles import RegisterTiles
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.workload import prim_func

_FIELDS = ("rows", "columns", "cluster", "split", "across", "stacked")


def chosen_tiles(spec: Any, family: str, target: str | Device | None = None) -> dict[str, Any]:
    """Complete the tiles of a family with nothing given, for a device whose clusters are counted.

    The families are ``"gemm"``, ``"registers"``, ``"dsm"``, ``"l2"`` and ``"global"``; the result
    is for `crossfuse.planner.kernels.every.read_kernel`. Refused where the rule has no tiles.
    """
    sch, on = ir.Schedule(prim_func(spec)), device(target)
    chain = read_chain(sch)
    if family == "registers":
        return asdict(RegisterTiles().complete(sch, chain, on))
    if family == "dsm":
        return asdict(ClusterTiles().complete(sch, chain, on))
    if family == "gemm":
        return _given(TensorTiles().complete(sch, chain))
    first = TensorTiles().of_first(sch, chain, on, staged=family == "l2")
    return {
        "first": _given(first),
        "second": _given(TensorTiles().of_second(sch, chain, first, on)),
    }


def _given(tiles: TensorTiles) -> dict[str, Any]:
    return {name: getattr(tiles, name) for name in _FIELDS}
