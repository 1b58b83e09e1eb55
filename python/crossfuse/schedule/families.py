"""Schedules functions by family of kernels, with tiles as plans and candidates name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.schedule.rules.cluster_tiles import ClusterTiles
from crossfuse.schedule.rules.clustered_ffn import schedule_clustered_ffn
from crossfuse.schedule.rules.register_ffn import schedule_register_ffn
from crossfuse.schedule.rules.register_tiles import RegisterTiles
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.schema import Damaged, typed


@dataclass(frozen=True)
class _Phases:
    """Tiles of a chain's two phases."""

    first: TensorTiles = field(default_factory=TensorTiles)
    second: TensorTiles = field(default_factory=TensorTiles)


def schedule_family(
    func: Any,
    family: str,
    tiles: Mapping[str, Any],
    target: str | Device,
    *,
    constant_weights: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Schedule a canonical function as a kernel of one of `crossfuse.planner.families.FAMILIES`.

    Tiles are fields of `TensorTiles`, `RegisterTiles` or `ClusterTiles`; of ``l2`` and ``global``
    those of `TensorTiles` for ``"first"`` and ``"second"``. Others are refused, and those left out
    are chosen for `target`, whose CTAs the rules count. No kernel that may still be running writes
    weights that are `constant_weights`; `options` are further arguments of the rule.
    """
    further = dict(options or {}, constant_weights=constant_weights)
    made = partial(_tiles, family)
    if family == "gemm":
        return schedule_tiled_gemm(func, tiles=made(TensorTiles, tiles), **further)
    if family == "registers":
        chosen = made(RegisterTiles, tiles)
        return schedule_register_ffn(func, tiles=chosen, target=target, **further)
    if family == "dsm":
        chosen = made(ClusterTiles, tiles)
        return schedule_clustered_ffn(func, tiles=chosen, target=target, **further)
    chosen = made(_Phases, tiles)
    first, second = chosen.first, chosen.second
    staged = family == "l2"
    return schedule_tiled_ffn(
        func, first=first, second=second, staged=staged, target=target, **further
    )


def _tiles(family: str, kind: type, given: Mapping[str, Any]) -> Any:
    try:
        return typed(kind, given)
    except Damaged as error:
        raise refuse(
            ScheduleRefused,
            "tiles",
            f"family '{family}'",
            found=error.found,
            limit=error.limit,
            instead="name tile extents like these",
        ) from None
