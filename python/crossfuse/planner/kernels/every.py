"""All kernels of a chain that the rules build: tiles that fit, family by family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import WARPGROUP, Device
from crossfuse.planner.families import FAMILIES
from crossfuse.planner.kernels.clustered import SLICE, ClusteredKernel
from crossfuse.planner.kernels.memory import Memory, memory, resident
from crossfuse.planner.kernels.registers import RegisterKernel
from crossfuse.planner.kernels.shape import Shape
from crossfuse.planner.kernels.tiled import TiledKernel
from crossfuse.planner.space.count import Step
from crossfuse.schema import Damaged, Extent, typed

Kernel: TypeAlias = "TiledKernel | ClusteredKernel | RegisterKernel"

_K = TypeVar("_K", bound="TiledKernel | ClusteredKernel | RegisterKernel")

_ROWS = (64.0, 128.0, 192.0, 256.0)
_CLUSTERS = (1.0, 2.0, 4.0, 8.0, 16.0)
_PARTS = 32
#: No given tiles: all of them are tried.
NOTHING: Mapping[str, int] = MappingProxyType({})


def families(shape: Shape) -> tuple[str, ...]:
    """Families that have kernels of a shape."""
    return FAMILIES[1:] if shape.l else FAMILIES[:1]


def every(family: str, shape: Shape, device: Device) -> Kernel:
    """List all legal tiles of a family as arrays, which are empty where nothing fits."""
    found = possible(family, shape)
    found = select(found, legal(found, shape, device))
    if count(found) == 0:
        return found
    return select(found, fitting(found, shape, device))


def possible(family: str, shape: Shape, given: Mapping[str, int] = NOTHING) -> Kernel:
    """List all tiles of a family before any rule, as arrays.

    Fields of the tiles that are `given`, of ``registers`` and ``dsm``, are not tried but fixed.
    """
    if family == "registers":
        return _registers(shape, given)
    return _clustered(shape, given) if family == "dsm" else _tiled(family, shape)


def legal(kernel: Kernel, shape: Shape, device: Device) -> np.ndarray:
    """Flag those of many kernels that keep all rules but for shared memory."""
    found = np.asarray(kernel.legal(shape, device), bool)
    return np.broadcast_to(found, (count(kernel),))


def fitting(kernel: Kernel, shape: Shape, device: Device) -> np.ndarray:
    """Flag those of many kernels that have shared memory for two stages of each ring."""
    fits = np.ones(count(kernel), bool)
    for each in memories(kernel, shape, device):
        fits &= np.asarray(each.fits, bool)
    return fits


def memories(kernel: Kernel, shape: Shape, device: Device) -> tuple[Memory, ...]:
    """Shared memory of each kernel that a candidate launches."""
    summed: Any = False
    if isinstance(kernel, RegisterKernel):
        summed = (kernel.parts > 1) & (kernel.size == 1)
    elif isinstance(kernel, ClusteredKernel):
        summed = kernel.parts > 1
    return tuple(memory(each, device, waits=summed) for each in kernel.kernels(shape))


def count(kernel: Kernel) -> int:
    """Candidates in a struct of arrays; 1 for plain numbers."""
    sizes = [np.size(getattr(kernel, each.name)) for each in fields(kernel)]
    return max(sizes) if min(sizes) else 0


def select(kernel: _K, which: Any) -> _K:
    """Select some candidates by a mask, by indices, or by one index, which gives plain numbers."""
    chosen: dict[str, Any] = {}
    for each in fields(kernel):
        value = getattr(kernel, each.name)
        if isinstance(value, np.ndarray) and value.ndim:
            value = value[which]
            if not np.ndim(value):
                value = bool(value) if value.dtype == bool else int(value)
        chosen[each.name] = value
    return replace(kernel, **chosen)


def _tiled(place: str, shape: Shape) -> TiledKernel:
    rows = _rows(shape, _ROWS)
    first = _columns(shape.n)
    second = _columns(shape.l) if shape.l else (0.0,)
    sizes, across = _CLUSTERS, (1.0, 2.0, 4.0)
    flags = (0.0, 1.0)
    split = flags if place != "l2" and shape.products == 1 else flags[:1]
    split2 = flags if shape.l else flags[:1]
    kernel = TiledKernel(place, *_grid(rows, first, second, sizes, across, flags, split, split2))
    named = {each: getattr(kernel, each) > 0 for each in ("stacked", "split", "split2")}
    kernel = replace(kernel, **named)
    # A cluster of one CTA is the same however it lies.
    single = (kernel.size == 1) & (kernel.stacked | kernel.split | kernel.split2)
    return select(kernel, ~single)


def _clustered(shape: Shape, given: Mapping[str, int]) -> ClusteredKernel:
    rows, sizes, parts = _grid(
        _given(given, "rows", _rows(shape, _ROWS[:2])),
        _given(given, "cluster", _CLUSTERS),
        _given(given, "parts", _counts(_PARTS)),
    )
    return ClusteredKernel(rows, sizes, parts, given.get("multiple", SLICE))


def _registers(shape: Shape, given: Mapping[str, int]) -> RegisterKernel:
    rows, columns, parts, clustered = _grid(
        _given(given, "rows", _rows(shape, _ROWS[:3])),
        _given(given, "columns", _columns(shape.l)),
        _given(given, "parts", _counts(_PARTS)),
        (0.0, 1.0),
    )
    size = np.where(clustered > 0, parts, 1.0)
    kernel = RegisterKernel(rows, columns, parts, size)
    kernel = select(kernel, ~((clustered > 0) & (parts == 1)))
    return select(kernel, kernel.size == given["cluster"]) if "cluster" in given else kernel


def _given(given: Mapping[str, int], name: str, options: Sequence[float]) -> Sequence[float]:
    """Options of a field of the tiles: only what is given, or each option."""
    return (float(given[name]),) if name in given else options


def _rows(shape: Shape, options: Sequence[float]) -> tuple[float, ...]:
    """Rows of tiles that are not mostly empty."""
    return tuple(each for each in options if each < shape.m + 64 or each == options[0])


def _columns(width: int) -> tuple[float, ...]:
    """Columns of tiles: multiples of 8, the fewest for each number of tiles side by side."""
    options = range(8, min(256, -(-width // 8) * 8) + 1, 8)
    fewest = {-(-width // each): each for each in reversed(options)}
    even = [each for each in options if each % 32 == 0]
    return tuple(float(each) for each in sorted({*fewest.values(), *even}))


def _counts(most: int) -> tuple[float, ...]:
    return tuple(float(each) for each in range(1, most + 1))


def _grid(*axes: Sequence[float]) -> list[np.ndarray]:
    """Build every combination, as one flat array for each axis."""
    return [each.ravel() for each in np.meshgrid(*map(np.asarray, axes), indexing="ij")]


# Kernels from the tiles that rules take, as records and plans hold them.


def read_kernel(family: str, tiles: Mapping[str, Any]) -> Kernel:
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
    try:
        if family == "registers":
            return RegisterKernel(*_extents(tiles, "rows", "columns", "parts", "cluster"))
        if family == "dsm":
            return ClusteredKernel(*_extents(tiles, "rows", "cluster", "parts"))
        return _read_tiled(family, tiles)
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
    """Read fields of tiles, which all have to be given."""
    if missing := [each for each in names if each not in tiles]:
        raise Damaged(f"no {missing[0]}", "all fields")
    return tuple(typed(Extent, tiles[each]) for each in names)


def _read_tiled(place: str, tiles: Mapping[str, Any]) -> TiledKernel:
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
    """Join kernels of one family into one struct of arrays."""
    chosen: dict[str, Any] = {}
    for each in fields(kernels[0]):
        values = [getattr(kernel, each.name) for kernel in kernels]
        if each.name in ("place", "multiple"):
            chosen[each.name] = values[0]
        else:
            flags = isinstance(values[0], bool)
            chosen[each.name] = np.array(values, bool if flags else np.float64)
    return replace(kernels[0], **chosen)


def pruned(family: str, shape: Shape, device: Device) -> tuple[Step, ...]:
    """Count the tiles of a family that are left after each rule in turn.

    The steps are ``"all"``, the family's rules, and ``"shared"``, which leaves as many as `every`.
    """
    found = possible(family, shape)
    left = np.ones(count(found), bool)
    steps = [Step("all", "tiles that are tried", len(left))]
    for rule in found.rules(shape, device):
        left &= np.asarray(rule.keeps, bool)
        steps.append(Step(rule.name, rule.text, int(np.count_nonzero(left))))
    few = select(found, left)
    fits = int(np.count_nonzero(fitting(few, shape, device))) if count(few) else 0
    room = f"two stages of each ring fit {device.max_shared_bytes >> 10} KiB of shared memory"
    return (*steps, Step("shared", room, fits))


def why_none(family: str, shape: Shape, device: Device) -> str:
    """Say why a family has no tiles that fit: the rule after which none were left."""
    if family not in families(shape):
        return f"{family} has no kernels of {'two products' if shape.l else 'one product'}"
    steps = pruned(family, shape, device)
    last = next((each for each in steps if not each.candidates), steps[-1])
    return f"'{last.text}' leaves {last.candidates} of {steps[0].candidates} tiles of {family}"


# Resources of kernels, and the bytes that they move between levels.


@dataclass(frozen=True)
class Resources:
    """Resources of the device that one kernel of a candidate takes."""

    #: CTAs of the grid, and of a cluster.
    ctas: int
    cluster: int
    #: Of a CTA: warpgroups that multiply, and one that loads.
    threads: int
    #: Of a CTA.
    shared_bytes: int
    #: Stages of the rings.
    left_stages: int
    right_stages: int
    #: Float32 registers of a thread that the widest phase sums in.
    sums: int
    #: SMs that have a CTA at the same time.
    busy: int


def resources(kernel: Kernel, shape: Shape, device: Device) -> tuple[Resources, ...]:
    """Resources of each kernel of one candidate."""
    size = int(kernel.cluster)
    found = []
    launched = kernel.clusters(shape, device)
    rooms = memories(kernel, shape, device)
    for phases, clusters, room in zip(kernel.kernels(shape), launched, rooms, strict=True):
        found.append(
            Resources(
                int(clusters) * size,
                size,
                WARPGROUP * (int(phases[0].warpgroups) + 1),
                int(room.size),
                int(room.left),
                int(room.right),
                max(int(each.sums) for each in phases),
                min(int(clusters), int(resident(device, size))) * size,
            )
        )
    return tuple(found)


def moved_bytes(kernel: Kernel, shape: Shape) -> dict[str, int]:
    """Bytes that one candidate moves through L2, and between the CTAs of clusters.

    Tiles count whole, even where they reach beyond a tensor, since whole ones are loaded.
    """
    size = int(kernel.cluster)
    l2 = shape.m * (shape.l or shape.n) * shape.out
    dsm = 0
    for phase in kernel.phases(shape):
        ctas = int(phase.tiles) * size
        left = phase.left / phase.left_sharers
        right = phase.right / phase.right_sharers
        l2 += int(ctas * phase.steps * (left + right))
        if phase.gathers:
            dsm += ctas * (size - 1) * int(phase.rows * phase.columns) * shape.item
        if phase.split > 1:
            dsm += ctas * int(phase.received * (phase.split - 1) / phase.split)
    if isinstance(kernel, TiledKernel):
        l2 += shape.m * shape.n * shape.item if shape.l else 0
    elif kernel.parts > (1 if kernel.family == "dsm" else size):
        # Each part stores its sums, and all of them are read once.
        second = kernel.phases(shape)[-1]
        rows = min(int(second.rows), shape.m)
        l2 += 2 * int(second.tiles) * size * rows * int(second.columns) * 4
    return {"l2": l2, "dsm": dsm}
