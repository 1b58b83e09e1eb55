"""All families of kernels, in the order in which they are listed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.families import ROWS, STREAM, TILES, dsm, gemm, global_memory, l2, registers
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.shape import Shape

#: Of chains, by name.
FAMILIES: Mapping[str, ChainFamily] = MappingProxyType(
    {
        each.name: each
        for each in (gemm.FAMILY, registers.FAMILY, dsm.FAMILY, l2.FAMILY, global_memory.FAMILY)
    }
)


def families(shape: Shape) -> tuple[ChainFamily, ...]:
    """Families that have kernels of a shape."""
    return tuple(each for each in FAMILIES.values() if each.matches(shape))


def read_kernel(family: str, tiles: Mapping[str, Any]) -> TileKernel:
    """Make a kernel of the fields of its rule's tiles, the inverse of ``tiles()``.

    These are `RegisterTiles`, `ClusterTiles` or `TensorTiles`; of l2 and global those of ``first``
    and ``second``. All of them must be given, else they are refused.
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
    return FAMILIES[family].read(tiles)


#: Of cascades, by name.
CASCADE_FAMILIES = (STREAM, TILES, ROWS)
#: Where the states of a cascade are, as `crossfuse.compile` names it: one CTA makes them; those of
#: a cluster merge; a second kernel merges them.
STATE_PLACES = ("registers", "dsm", "global")
