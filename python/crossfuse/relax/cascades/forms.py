"""What a plain function is as a cascade, and the kernel that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import asdict
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.derivation import Derivation
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiled.tile_context import has_products, tile_context
from crossfuse.cascade.rewrite.tiled.tiled import tiled
from crossfuse.cascade.rewrite.tiles import CascadeTiles, StreamTiles
from crossfuse.cascade.rewrite.work import work_of
from crossfuse.cascade.site import Site
from crossfuse.errors import CascadeRefused, PlanRefused, RefusedError, contained, refuse
from crossfuse.hardware import Device
from crossfuse.planner.cascade.plan import ranked_cascade
from crossfuse.planner.cascade.shape import cascade_shape
from crossfuse.planner.families import EAGER, ROWS, STREAM
from crossfuse.planner.families import TILES as OF_TILES
from crossfuse.planner.families.registry import read_tiles
from crossfuse.planner.families.rows import RowsTiles
from crossfuse.relax.calls import with_plan
from crossfuse.relax.cascades.found import (
    ROWS_FIRST,
    THREADS,
    TILES,
    Found,
    Kernel,
    mentions_all,
    once,
)
from crossfuse.schedule.cascades import schedule_cascade
from crossfuse.schedule.rules.cascade_tiles import schedule_tiled
from crossfuse.schedule.rules.stream import schedule_stream

#: The place that refusals of a group name; the report names the operators beside it.
_WHERE = "a group of reductions"


class Forms:
    """Finds cascades and their kernels, once for functions that are equal but for names.

    Given `tiles` and `stream` are used as they are; None leaves them to the planner.
    """

    def __init__(
        self, target: Device, tiles: CascadeTiles | None, stream: StreamTiles | None
    ) -> None:
        self.target = target
        self.tiles = tiles
        self.stream = stream
        self._found: dict[int, list[Found]] = {}
        self._alike: dict[Hashable, Found] = {}
        self._refusals: dict[Found, str] = {}
        self._kernels: dict[Found, Kernel | str] = {}
        self._texts: dict[Found, tuple[Any, Any]] = {}
        self._whys: dict[Site, str] = {}

    def found(self, func: Any) -> Found:
        """What detection finds of a function."""
        known = self._found.setdefault(int(ir.tvm_ffi.structural_hash(func)), [])
        for each in known:
            if ir.tvm_ffi.structural_equal(each.func, func):
                return each
        known.append(_find(func))
        return known[-1]

    def found_once(self, alike: Hashable, make: Callable[[], Any]) -> Found:
        """What detection finds of a function, made only if no equal one is known by `alike`."""
        if alike not in self._alike:
            self._alike[alike] = self.found(make())
        return self._alike[alike]

    def refusal(self, found: Found) -> str:
        """Why a cascade has no form in which it streams, as far as is known; empty if it has one.

        Whether the kernel lowers is known only after `kernel`.
        """
        kernel = self._kernels.get(found)
        if kernel is not None:
            return kernel if isinstance(kernel, str) else ""
        if found not in self._refusals:
            self._refusals[found] = found.reason or self._refused(found)
        return self._refusals[found]

    def kernel(self, found: Found) -> Kernel | str:
        """The kernel of a cascade, or why there is none."""
        if found not in self._kernels:
            self._kernels[found] = self.refusal(found) or self._made(found)
        return self._kernels[found]

    def _sizes(self, site: Site, derivation: Derivation) -> Any:
        """The sizes of a cascade's kernel; refuses if none fit."""
        given = self.tiles if has_products(site) else self.stream
        if given is not None:
            return given
        shape = cascade_shape(site, derivation)
        if shape.product is None or self.tiles is not None or self.stream is not None:
            (best,) = ranked_cascade(shape, self.target, only=(STREAM, OF_TILES), keep=1)
            return read_tiles(best.family, best.tiles)
        (best,) = ranked_cascade(shape, self.target, only=(ROWS,), keep=1)
        (eager,) = ranked_cascade(shape, self.target, only=(EAGER,))
        self._whys[site] = _against_eager(best.microseconds, eager.microseconds)
        return read_tiles(ROWS, best.tiles)

    def _refused(self, found: Found) -> str:
        """Why a cascade is no stream; empty if it is."""
        try:
            with contained(CascadeRefused, "fuse-cascades", _WHERE):
                _, text = self._written(found)
        except RefusedError as error:
            return str(error)
        return text if isinstance(text, str) else ""

    def _written(self, found: Found) -> tuple[Any, Any]:
        """The sizes of a cascade, and the stream that it is rewritten as, or why it cannot be.

        None for rows in their product's kernel, which are rewritten when they are scheduled.
        """
        if found not in self._texts:
            site, derivation = _known(found)
            sizes = self._sizes(site, derivation)
            self._texts[found] = sizes, _stream(site, derivation, sizes)
        return self._texts[found]

    def _made(self, found: Found) -> Kernel | str:
        site, derivation = _known(found)
        sizes, text = self._written(found)
        try:
            with contained(CascadeRefused, "fuse-cascades", _WHERE):
                form, schedule = self._lowered(site, derivation, sizes, text)
        except RefusedError as error:
            return str(error)
        (image,) = schedule.mod.functions.values()
        plan = {"family": form, "tiles": asdict(sizes)}
        return Kernel(form, with_plan(image, plan), _moved(found, sizes), self._whys.get(site, ""))

    def _lowered(
        self, site: Site, derivation: Derivation, sizes: Any, text: Any
    ) -> tuple[str, Any]:
        """The form and the schedule of a kernel.

        Chosen sizes must lower; the caller answers for given ones.
        """
        from crossfuse.lower.extract import lower

        try:
            form, schedule = _scheduled(site, derivation, sizes, text)
            if (self.tiles if form == TILES else self.stream) is None:
                lower(schedule, self.target)
        except ir.tvm.error.InternalError as error:  # TVM's own checks of what was written
            raise refuse(
                CascadeRefused,
                "fuse-cascades",
                _WHERE,
                found=f"a stream that TVM does not take: {str(error).splitlines()[0]}",
                limit="what TVM compiles",
                instead="leave it to separate kernels",
            ) from error
        return form, schedule


def _against_eager(ours: float, eager: float) -> str:
    """Estimates of rows in their product's kernel; refuses if separate kernels are faster."""
    if ours < eager:
        return f"about {ours:.1f} us with its product, {eager:.1f} us in separate kernels"
    raise refuse(
        PlanRefused,
        "fuse-cascades",
        "rows before a product",
        found=f"about {ours:.1f} us in one kernel",
        limit=f"less than separate kernels, about {eager:.1f} us",
        instead="leave them apart, or compile the function by itself with crossfuse.compile",
    )


def recomputed(site: Site, derivation: Derivation, tiles: CascadeTiles) -> str:
    """Why a cascade of products in tiles would make elements more than once; else empty."""
    rows = [each for each in site.rows if int(site.extents[each]) > 1]
    for symbol, block in site.producers.items():
        left = [each for each in rows if not mentions_all(site.reads[symbol], [each])]
        if left:
            times = prod(int(site.extents[each]) for each in left)
            return f"each element of block '{block}' would be computed for {times} rows again"
    count = tile_context(site, derivation, tiles).column_tiles if site.producers else 1
    if count > 1:
        block = next(iter(site.producers.values()))
        return f"each of {count} tiles of columns would compute the elements of block '{block}'"
    return ""


def _stream(site: Site, derivation: Derivation, sizes: Any) -> Any:
    """A cascade as a stream, or why it cannot be written so; None of rows before a product."""
    if isinstance(sizes, RowsTiles):
        return None  # the planner offers them for functions of that form alone
    try:
        if has_products(site):
            return recomputed(site, derivation, sizes) or tiled(site, derivation, sizes)
        return streaming(site, derivation, sizes)
    except RefusedError as error:
        return str(error)


def _find(func: Any) -> Found:
    try:
        with contained(CascadeRefused, "fuse-cascades", _WHERE):
            sites = detect(ir.narrow(func))
            if len(sites) > 1:
                reason = f"its reductions are {len(sites)} sets that share no axis"
                return Found(func, reason=reason)
            return Found(func, sites[0], derive(sites[0].cascade))
    except RefusedError as error:
        return Found(func, reason=str(error))


def _known(found: Found) -> tuple[Site, Derivation]:
    assert found.site is not None and found.derivation is not None
    return found.site, found.derivation


def _scheduled(site: Site, derivation: Derivation, sizes: Any, text: Any) -> tuple[str, Any]:
    """The form of a cascade with some sizes, and the schedule of its rewritten function."""
    if isinstance(sizes, RowsTiles):
        return ROWS_FIRST, schedule_cascade(site, derivation, ROWS, asdict(sizes))
    if has_products(site):
        return TILES, schedule_tiled(text, sizes)
    return THREADS, schedule_stream(text, sizes)


def _moved(found: Found, sizes: Any) -> int:
    """Bytes of all tensors, and of elements that a stream loads again."""
    site, derivation = _known(found)
    total = once(found.func)
    if isinstance(sizes, StreamTiles) and site.cascade.rows and sizes.resident == "none":
        work = work_of(site, derivation)
        total += work.rows * work.length * work.kept
    return total
