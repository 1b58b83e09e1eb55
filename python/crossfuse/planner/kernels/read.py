"""Kernels from the tiles that rules take, as records and plans hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.families import FAMILIES
from crossfuse.planner.kernels.clustered import ClusteredKernel
from crossfuse.planner.kernels.every import Kernel
from crossfuse.planner.kernels.registers import RegisterKernel
from crossfuse.planner.kernels.tiled import TiledKernel
from crossfuse.schema import Damaged, Extent, typed


def read_kernel(family: str, tiles: Mapping[str, Any]) -> Kernel:
    """Make a kernel of the fields of its rule's tiles, the inverse of ``tiles()``.

    Parameters
    ----------
    family : str
        One of `FAMILIES`.
    tiles : Mapping[str, Any]
        Fields of `RegisterTiles`, `ClusterTiles` or `TensorTiles`; of l2 and global those of
        ``first`` and ``second``. All of them are given.

    Raises
    ------
    PlanRefused
        An unknown family, or a field that is missing.
    """
    if family not in FAMILIES:
        raise refuse(
            PlanRefused,
            "kernel-family",
            "family",
            found=repr(family),
            limit=", ".join(FAMILIES),
            instead="name one of these",
        )
    try:
        if family == "registers":
            return RegisterKernel(*_extents(tiles, "rows", "columns", "parts", "cluster"))
        if family == "dsm":
            return ClusteredKernel(*_extents(tiles, "rows", "cluster", "parts"))
        return _tiled(family, tiles)
    except Damaged as missing:
        raise refuse(
            PlanRefused,
            "kernel-tiles",
            family,
            found=missing.found,
            limit="every field that says how the chain is divided",
            instead="write the field; nothing is chosen for a kernel that is given",
        ) from missing


def _extents(tiles: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    """Fields of tiles, which all have to be given."""
    if missing := [each for each in names if each not in tiles]:
        raise Damaged(f"no {missing[0]}", "all fields")
    return tuple(typed(Extent, tiles[each]) for each in names)


def _tiled(place: str, tiles: Mapping[str, Any]) -> TiledKernel:
    phases = {"first": tiles} if place == "gemm" else typed(Mapping[str, Mapping[str, Any]], tiles)
    rows, columns, split, cluster, across = _extents(
        phases.get("first", {}), "rows", "columns", "split", "cluster", "across"
    )
    kernel = TiledKernel(
        place,
        rows,
        columns,
        size=max(split, cluster),
        across=across,
        stacked=bool(phases["first"].get("stacked")) if place != "gemm" else split == 1,
        split=split > 1,
    )
    if place == "gemm":
        return replace(kernel, stacked=bool(kernel.size > 1 and not kernel.split))
    columns, split = _extents(phases.get("second", {}), "columns", "split")
    return replace(kernel, columns2=columns, split2=split > 1)


def stack(kernels: Sequence[Kernel]) -> Kernel:
    """Kernels of one family as one struct of arrays."""
    chosen: dict[str, Any] = {}
    for each in fields(kernels[0]):
        values = [getattr(kernel, each.name) for kernel in kernels]
        if each.name in ("place", "multiple"):
            chosen[each.name] = values[0]
        else:
            flags = isinstance(values[0], bool)
            chosen[each.name] = np.array(values, bool if flags else np.float64)
    return replace(kernels[0], **chosen)
