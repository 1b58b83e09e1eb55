"""Sizes of streams with products, those first that are to be tried first."""

from __future__ import annotations

from crossfuse.cascade.derivation import Derivation
from crossfuse.cascade.rewrite.tiled.frame import TileFrame, frame_of
from crossfuse.cascade.rewrite.tiled.sizes import WIDE, CascadeTiles
from crossfuse.cascade.site import Site
from crossfuse.hardware import Device

#: CTAs that share an axis longer than this, if there are too few tiles of rows.
_CLUSTERS, _LONG = (8, 4, 2), 1024
#: Elements of a step; 0 lets `CascadeTiles` choose.
_ELEMENTS = (0, 96, 64, 32)


def has_products(site: Site) -> bool:
    """Whether a cascade has elements that a product makes, or results with columns."""
    return bool(site.producers) or any(each.columns for each in site.stages.values())


def choose_product_tiles(
    site: Site, derivation: Derivation, target: Device
) -> tuple[CascadeTiles, ...]:
    """Choose sizes of a cascade with products.

    Where tiles of rows are too few for the device, clusters share the axis of each; by hand-written
    kernels of decoding (one sequence of 8192 keys, 8 heads of them, on an H100) 8 CTAs a cluster
    are the fastest then. Where sums are so wide that 64 rows are a tile, two tiles side by side
    load their operands once: L2 gives 6 TB/s at best, and a cache of latent vectors that each tile
    of 64 heads loads for itself would take all of that. Fewer elements a step leave registers to an
    expression that needs more.

    Parameters
    ----------
    site : Site
        See `has_products`.
    derivation : Derivation
        How it streams.
    target : Device
        What to choose for.

    Returns
    -------
    tuple[CascadeTiles, ...]
        The first is to be taken that can be lowered.

    Raises
    ------
    CascadeRefused
        If the cascade has no tile form.
    """
    frame = frame_of(site, derivation, CascadeTiles())
    few = [each for each in _CLUSTERS if frame.places * each <= target.sms]
    shared = few if frame.length > _LONG else []
    split = tuple(CascadeTiles(elements=64, cluster=each) for each in shared)
    beside = (CascadeTiles(share=2),) if _is_wide(frame) and frame.row_tiles % 2 == 0 else ()
    return (*split, *beside, *(CascadeTiles(elements=each) for each in _ELEMENTS))


def _is_wide(frame: TileFrame) -> bool:
    """Whether sums are so wide that a tile has few rows, which all read as much as many would."""
    return bool(frame.products) and WIDE < frame.widest <= 2 * WIDE
