"""The pass that rewrites cascades of reductions in the functions of a module as streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiled.sizes import CascadeTiles
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.site import Site
from crossfuse.errors import RefusedError
from crossfuse.schedule.rules.cascade_tiles import schedule_cascade_tiles
from crossfuse.schedule.rules.stream import schedule_stream

#: TVM's attribute of functions that no schedule is to be found for any more.
SCHEDULED = "tirx.is_scheduled"


@dataclass(frozen=True)
class Outcome:
    """What became of a function.

    Attributes
    ----------
    function : str
        Its name in the module.
    form : str
        ``"tiles"`` of products, ``"threads"`` that stream, or empty where it was left alone.
    reason : str
        The reductions that were fused, or why none were.
    """

    function: str
    form: str
    reason: str


@ir.tvm.ir.transform.module_pass(opt_level=0, name="crossfuse.FuseCascades")
class FuseCascades:
    """Rewrite cascades of reductions as streams, scheduled for the GPU.

    A pass over modules after ``LegalizeOps`` (and ``FuseOps``, ``FuseTIR``), whose functions have a
    block for each operator. A function whose reductions share an axis is replaced: by the tile form
    if products make its elements or its results (attention, products behind norms), else by threads
    that stream (softmax, norms, losses). All others stay as they are.

    Parameters
    ----------
    tiles : CascadeTiles | None
        Sizes of tile forms; None chooses them.
    stream : StreamTiles | None
        Sizes of other streams; None takes the defaults.

    Attributes
    ----------
    outcomes : tuple[Outcome, ...]
        What became of each function of the last module, in its order.

    Examples
    --------
    >>> fuse = FuseCascades()                       # doctest: +SKIP
    >>> mod = tvm.ir.transform.Sequential([relax.transform.LegalizeOps(), fuse])(mod)
    >>> [each.form for each in fuse.outcomes]
    """

    def __init__(
        self, tiles: CascadeTiles | None = None, stream: StreamTiles | None = None
    ) -> None:
        self.tiles = tiles
        self.stream = stream
        self.outcomes: tuple[Outcome, ...] = ()

    def transform_module(self, mod: Any, _context: Any) -> Any:
        """See `FuseCascades`."""
        found: list[Outcome] = []
        made = mod.clone()
        for name, func in mod.functions_items():
            if isinstance(func, ir.PrimFunc):
                outcome, image = self._fused(str(name.name_hint), func)
                found.append(outcome)
                if image is not None:
                    made.update_func(name, image)
        self.outcomes = tuple(found)
        return made

    def _fused(self, name: str, func: Any) -> tuple[Outcome, Any]:
        if func.attrs and SCHEDULED in func.attrs:
            return Outcome(name, "", "it is scheduled already"), None
        try:
            sites = detect(_narrow(func))
            reason = _reason_against(sites)
            if reason:
                return Outcome(name, "", reason), None
            form, schedule = self._scheduled(sites[0])
        except RefusedError as error:
            return Outcome(name, "", str(error)), None
        (image,) = schedule.mod.functions.values()
        return Outcome(name, form, _text(sites[0])), _with_attributes(image, func)

    def _scheduled(self, site: Site) -> tuple[str, Any]:
        """The form that a cascade takes, and its schedule."""
        derivation = derive(site.cascade)
        if site.producers or any(each.columns for each in site.stages.values()):
            return "tiles", schedule_cascade_tiles(site, derivation, self.tiles)
        sizes = self.stream or StreamTiles()
        return "threads", schedule_stream(streaming(site, derivation, sizes), sizes)


def _narrow(func: Any) -> Any:
    """A function that counts in 32 bits, as kernels do; as it is if it holds larger numbers."""
    module = ir.IRModule({"main": func})
    try:
        return ir.tirx.transform.ForceNarrowIndexToInt32()(module)["main"]
    except ir.tvm.error.InternalError:
        return func


def _reason_against(sites: tuple[Site, ...]) -> str:
    """Why a function is left alone; empty if it is not."""
    if len(sites) > 1:
        return f"its reductions are {len(sites)} sets that share no axis"
    (site,) = sites
    if len(site.cascade.stages) == 1 and not site.cascade.rows:
        return "it has one reduction, which reads each element once as it is"
    return ""


def _text(site: Site) -> str:
    """Reductions and their axis, for people."""
    stages = ", ".join(f"{each.name} ({each.monoid.name})" for each in site.cascade.stages)
    return f"{stages} over {int(site.extents[site.axis])} elements"


def _with_attributes(image: Any, func: Any) -> Any:
    """A function with the attributes of another one beside its own, and scheduled."""
    image = image.without_attr("global_symbol")
    for name, value in (func.attrs or {}).items():
        image = image.with_attr(name, value)
    return image.with_attr(SCHEDULED, True)
