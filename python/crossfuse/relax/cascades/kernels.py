"""What a plain function is as a cascade, the kernel that it becomes, and the bytes that saves."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.detect.program import Program, read_program
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiled.tile_context import tile_context
from crossfuse.cascade.rewrite.tiled.tiled import tiled
from crossfuse.cascade.rewrite.tiles import CascadeTiles, StreamTiles
from crossfuse.cascade.rewrite.work import work_of
from crossfuse.cascade.spec import Derivation, Site, check_extremes
from crossfuse.errors import CascadeRefused, PlanRefused, RefusedError, contained, refuse
from crossfuse.hardware import Device
from crossfuse.planner.cascade.plan import ranked_cascade
from crossfuse.planner.cascade.shape import cascade_shape
from crossfuse.planner.families import EAGER, ROWS, STREAM, TILES, WARPS
from crossfuse.planner.families.registry import read_tiles
from crossfuse.planner.families.rows import RowsTiles
from crossfuse.relax.calls import Equal, with_plan
from crossfuse.schedule.planned import schedule_cascade
from crossfuse.schedule.rules.stream import schedule_stream, schedule_tiled

#: The form of kernels of threads that stream; others are those of the families `TILES` and `ROWS`.
THREADS = "threads"


@dataclass(frozen=True, eq=False)
class Found:
    """What detection found in a function: a cascade that streams, or why there is none."""

    #: As it was given; None of calls that do not become one.
    func: Any
    #: Its only cascade, in a function narrowed to 32-bit indices; None if it has none, or several.
    site: Site | None = None
    #: How the cascade streams.
    derivation: Derivation | None = None
    #: Why it does not; empty if it does.
    reason: str = ""

    @property
    def stages(self) -> int:
        """How many reductions share the axis."""
        return len(self.site.stages) if self.site else 0

    @property
    def producers(self) -> frozenset[str]:
        """Names of blocks that make elements."""
        return frozenset(self.site.producers.values()) if self.site else frozenset()

    @property
    def is_product(self) -> bool:
        """Whether a stage has many results for a row, or no element belongs to one row alone."""
        if self.site is None:
            return False
        rows = [each for each in self.site.rows if int(self.site.extents[each]) > 1]
        reads = [self.site.reads[each] for each in self.site.cascade.elements]
        shared = bool(reads) and not any(mentions_all(each, rows) for each in reads)
        return shared or any(each.columns for each in self.site.stages.values())

    @property
    def plain(self) -> str:
        """Why there is nothing to stream; empty if there is.

        It is one reduction that reads each element once, or two products in a row.
        """
        site = self.site
        if site is None or self.stages != 1 or site.cascade.rows:
            return ""
        if not site.producers:
            return "it has one reduction, which reads each element once as it is"
        return "it is a product of what another product makes" if self.is_product else ""


@dataclass(frozen=True, eq=False)
class Kernel:
    """The kernel that a cascade becomes."""

    #: `TILES`, `THREADS` or `ROWS`.
    form: str
    #: Scheduled.
    func: Any
    #: Bytes that it moves, counted as described below.
    bytes: int
    #: The planner's estimates, where separate kernels could be faster; else empty.
    why: str = ""


#: The place that refusals of a group name; the report names the operators beside it.
_WHERE = "a group of reductions"


class Cascades:
    """Finds cascades and their kernels, once for functions that are equal but for names.

    Given `tiles` and `stream` are used as they are; None leaves them to the planner.
    """

    def __init__(
        self, target: Device, tiles: CascadeTiles | None, stream: StreamTiles | None
    ) -> None:
        self.target = target
        self.tiles = tiles
        self.stream = stream
        self._found = Equal()
        self._alike: dict[Hashable, Found] = {}
        self._kernels: dict[Found, Kernel | str] = {}
        self._texts: dict[Found, tuple[Any, Any, str]] = {}

    def found(self, func: Any) -> Found:
        """What detection finds of a function."""
        return self._found.find(func, lambda: _find(func))

    def found_once(self, alike: Hashable, make: Callable[[], Any]) -> Found:
        """What detection finds of a function, made only if no equal one is known by `alike`.

        Functions written outside of TVM's operators may not join others, such as those of 32-bit
        extents; that costs one group and not the whole model.
        """
        if alike not in self._alike:
            try:
                func = make()
            except ir.tvm.error.InternalError as error:
                reason = f"TVM does not join them: {str(error).splitlines()[-1]}"
                self._alike[alike] = Found(None, reason=reason)
            else:
                self._alike[alike] = self.found(func)
        return self._alike[alike]

    def refusal(self, found: Found) -> str:
        """Why a cascade has no form in which it streams, as far as is known; empty if it has one.

        Whether the kernel lowers is known only after `kernel`.
        """
        kernel = self._kernels.get(found)
        if kernel is not None:
            return kernel if isinstance(kernel, str) else ""
        text = found.reason or self._written(found)[1]
        return text if isinstance(text, str) else ""

    def kernel(self, found: Found) -> Kernel | str:
        """The kernel of a cascade, or why there is none."""
        if found not in self._kernels:
            self._kernels[found] = self.refusal(found) or self._made(found)
        return self._kernels[found]

    def _written(self, found: Found) -> tuple[Any, Any, str]:
        """The sizes of a cascade, what it is rewritten as, or why it cannot be, and estimates.

        It is None for rows in their product's kernel, which are rewritten when they are scheduled.
        """
        if found not in self._texts:
            site, derivation = _known(found)
            try:
                with contained(CascadeRefused, "fuse-cascades", _WHERE):
                    sizes, why = self._sizes(site, derivation)
                    self._texts[found] = sizes, _stream(site, derivation, sizes), why
            except RefusedError as error:
                self._texts[found] = None, str(error), ""
        return self._texts[found]

    def _sizes(self, site: Site, derivation: Derivation) -> tuple[Any, str]:
        """The sizes of a cascade's kernel, and estimates of separate ones; refuses if none fit."""
        given = self.tiles if site.has_products else self.stream
        if given is not None:
            return given, ""
        shape = cascade_shape(site, derivation)
        if shape.product is None or self.tiles is not None or self.stream is not None:
            (best,) = ranked_cascade(shape, self.target, only=(STREAM, TILES, WARPS), keep=1)
            return read_tiles(best.family, best.tiles), ""
        (best,) = ranked_cascade(shape, self.target, only=(ROWS,), keep=1)
        (eager,) = ranked_cascade(shape, self.target, only=(EAGER,))
        return read_tiles(ROWS, best.tiles), _against_eager(best.microseconds, eager.microseconds)

    def _made(self, found: Found) -> Kernel | str:
        site, derivation = _known(found)
        sizes, text, why = self._written(found)
        try:
            check_extremes(derivation)
            with contained(CascadeRefused, "fuse-cascades", _WHERE):
                form, schedule = self._lowered(site, derivation, sizes, text)
        except RefusedError as error:
            return str(error)
        (image,) = schedule.mod.functions.values()
        plan = {"family": form, "tiles": asdict(sizes)}
        return Kernel(form, with_plan(image, plan), _moved(found, sizes), why)

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


def mentions_all(expression: Any, variables: list[Any]) -> bool:
    """Whether an expression uses all given variables."""
    used = list(ir.variables(expression))
    return all(any(each.same_as(var) for var in used) for each in variables)


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
        if site.has_products:
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
        return ROWS, schedule_cascade(site, derivation, ROWS, asdict(sizes))
    if site.has_products:
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


# Bytes that functions move between memory and the chip, counted before fusing and after.
#
# Before, each reduction and each output of a function is a sweep of its own: it reads what it is
# made of once, with the element-wise blocks in front of it inlined, and writes its result. After,
# every tensor is read and written once; outputs over the axis of a stream may read elements again.
# What caches save is not known, hence left out.


def swept(func: Any) -> int:
    """Bytes that a plain function moves if each of its reductions is a loop nest of its own.

    It is in s_tir form; a function that cannot be read counts the bytes of its parameters.
    """
    try:
        program = read_program(func)
    except RefusedError:
        return once(func)
    total = 0
    blocks = {id(each): each for each in program.made.values()}
    for block in blocks.values():
        if block.combine or any(each in program.outputs for each in block.buffers):
            total += sum(_bytes(each) for each in block.buffers) + _read(program, block)
    return total


def once(func: Any) -> int:
    """Bytes of all buffers among a function's parameters."""
    return sum(_bytes(each) for each in func.params if ir.is_buffer_var(each))


def _read(program: Program, block: Any) -> int:
    """Bytes that a block reads: at most one element of a tensor per iteration."""
    turns = 1
    for extent in block.domain.values():
        turns *= int(extent)
    found: dict[Any, int] = {}
    for load in program.loads(block):
        if load.buffer not in program.made or not load.buffer.same_as(block.buffer):
            item = ir.item_bytes(load.buffer.ty.dtype)
            found[load.buffer] = min(_bytes(load.buffer), turns * item)
    return sum(found.values())


def _bytes(buffer: Any) -> int:
    """Bytes of a tensor; 0 if its shape is not known."""
    extents = [ir.constant(each) for each in buffer.ty.shape]
    return prod(each or 0 for each in extents) * ir.item_bytes(buffer.ty.dtype)
