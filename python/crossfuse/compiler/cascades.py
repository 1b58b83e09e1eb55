"""Ways to schedule a cascade of reductions, the best one first."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from crossfuse.compiler.option import Option
from crossfuse.compiler.source import Source
from crossfuse.errors import CascadeRefused, RefusedError, refuse
from crossfuse.hardware import Device

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.rewrite.tiled.sizes import CascadeTiles
    from crossfuse.cascade.rewrite.tiles import StreamTiles
    from crossfuse.cascade.site import Site


def is_cascade(source: Source) -> bool:
    """Whether a source is to be compiled as a cascade.

    Its spec says so, or it is a function that holds a cascade and no chain. What holds neither is
    left to the rules of chains, which say what they miss.
    """
    if source.cascade is not None:
        return True
    if source.func is None or source.spec is not None or source.outlined is not None:
        return False
    from crossfuse import _tvm as ir
    from crossfuse.schedule.rules.chain import read_chain

    try:
        read_chain(ir.Schedule(source.func))
    except RefusedError:
        return _holds_cascade(source.func)
    return False


def _holds_cascade(func: Any) -> bool:
    from crossfuse.cascade.detect import detect

    try:
        return bool(detect(func))
    except RefusedError:
        return False


def cascade_options(source: Source, target: Device) -> list[Option]:
    """Ways to schedule a cascade.

    Parameters
    ----------
    source : Source
        See `is_cascade`.
    target : Device
        What to schedule for.

    Returns
    -------
    list[Option]
        At least one.

    Raises
    ------
    CascadeRefused
        If the function holds no cascade, several, or one that cannot stream, with the reason.
    """
    from crossfuse import _tvm as ir
    from crossfuse.cascade.algebra import derive
    from crossfuse.cascade.rewrite.tiled.choose import choose_product_tiles, has_products

    # Importers count in 64 bits, and kernels in 32.
    site = only_site(ir.narrow(source.func))
    derivation = derive(site.cascade)
    if has_products(site):
        return [
            Option(partial(_tiled, site, derivation, each), why={"tiles": asdict(each)})
            for each in choose_product_tiles(site, derivation, target)
        ]
    from crossfuse.cascade.rewrite.choose import choose_tiles

    return [
        Option(partial(_stream, site, derivation, each), why={"stream": asdict(each)})
        for each in choose_tiles(site, derivation, target)
    ]


def only_site(func: Any) -> Site:
    """The one cascade of a function.

    Raises
    ------
    CascadeRefused
        If there are several.
    """
    from crossfuse.cascade.detect import detect

    sites = detect(func)
    if len(sites) == 1:
        return sites[0]
    raise refuse(
        CascadeRefused,
        "compile",
        "function",
        found=f"{len(sites)} cascades over different axes",
        limit="one, which becomes one kernel",
        instead="split the function between them, or run crossfuse.relax.FuseCascades on its model",
    )


def _tiled(site: Site, derivation: Derivation, tiles: CascadeTiles) -> Any:
    from crossfuse.schedule.rules.cascade_tiles import schedule_cascade_tiles

    return schedule_cascade_tiles(site, derivation, tiles)


def _stream(site: Site, derivation: Derivation, tiles: StreamTiles) -> Any:
    from crossfuse.cascade.rewrite.streaming import streaming
    from crossfuse.schedule.rules.stream import schedule_stream

    return schedule_stream(streaming(site, derivation, tiles), tiles)
