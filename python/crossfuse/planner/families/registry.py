"""All families of kernels, in the order in which they are listed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cost.estimate import fastest
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families import parted, phases, skinny, tiled
from crossfuse.planner.families.attention_out import AttentionOut
from crossfuse.planner.families.family import CascadeFamily, ChainFamily
from crossfuse.planner.families.row_sums import RowSums
from crossfuse.planner.families.rows import Rows
from crossfuse.planner.families.rows_chain import RowsChain
from crossfuse.planner.families.stream import Stream
from crossfuse.planner.families.tiles import Tiles, Warps
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.shape import Shape, count

_F = TypeVar("_F")

#: Of chains, by name.
FAMILIES: Mapping[str, ChainFamily] = MappingProxyType(
    {
        each.name: each
        for each in (
            tiled.GEMM,
            parted.IN_REGISTERS,
            parted.DSM,
            tiled.STAGED,
            tiled.SEPARATE,
            phases.PHASES,
            phases.LAUNCHES,
            skinny.FAMILY,
        )
    }
)

#: Of cascades, by name.
CASCADE_FAMILIES: Mapping[str, type[CascadeFamily[Any, Any]]] = MappingProxyType(
    {each.name: each for each in (Stream, Tiles, Warps, Rows, RowsChain, AttentionOut, RowSums)}
)
#: Where the states of a cascade are, as `crossfuse.compile` names it: one CTA makes them; those of
#: a cluster merge; a second kernel merges them.
STATE_PLACES = ("registers", "dsm", "global")


def families(shape: Shape) -> tuple[ChainFamily, ...]:
    """Families that have kernels of a shape."""
    return tuple(each for each in FAMILIES.values() if each.matches(shape))


def family_times(
    shape: Shape, device: Device, families: Iterable[ChainFamily]
) -> tuple[tuple[str, float], ...]:
    """Microseconds of the fastest kernel of each family that has any, the fastest first."""
    rates, found = rates_of(device), []
    for family in families:
        kernels = family.every(shape, device)
        if count(kernels):
            _, times = fastest(kernels, shape, device, rates)
            found.append((family.name, float(times[0])))
    return tuple(sorted(found, key=lambda each: each[1]))


def read_kernel(family: str, given: Mapping[str, Any]) -> TileKernel:
    """Make a kernel of the fields of its rule's tiles, the inverse of ``tiles()``.

    These are `RegisterTiles`, `ClusterTiles` or `TensorTiles`; of l2 and global those of ``first``
    and ``second``. All of them must be given, else they are refused.
    """
    return _named(FAMILIES, family, "kernel-family").read(given)


def cascade_families(shape: CascadeShape) -> tuple[CascadeFamily[Any, Any], ...]:
    """Families that have kernels of a cascade."""
    return tuple(each(shape) for each in CASCADE_FAMILIES.values() if each.matches(shape))


def read_tiles(family: str, given: Mapping[str, Any]) -> Any:
    """Make tiles of a cascade of their fields.

    Those left out are as in the class; unknown fields and families are refused.
    """
    return _named(CASCADE_FAMILIES, family, "tiles").read(given)


def _named(known: Mapping[str, _F], family: str, rule: str) -> _F:
    if family not in known:
        raise refuse(
            PlanRefused,
            rule,
            "family",
            found=repr(family),
            limit=", ".join(known),
            instead="name one of these",
        )
    return known[family]
