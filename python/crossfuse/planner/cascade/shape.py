"""A cascade as the planner sees it: counted work, without functions or expressions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossfuse.cascade.rewrite.passes import Pass
from crossfuse.cascade.rewrite.tiled.work import TileWork
from crossfuse.cascade.rewrite.work import Work
from crossfuse.planner.cascade.rows_product import RowsProduct, rows_product_of
from crossfuse.planner.families import ROWS, STREAM, TILES

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.site import Site
    from crossfuse.workload.cascade_spec import CascadeSpec


@dataclass(frozen=True)
class CascadeShape:
    """What is computed.

    Attributes
    ----------
    name : str
        Text of the spec, or what else it is called.
    work : Work | TileWork
        Of a stream of threads, or of tiles with products.
    passes : tuple[Pass, ...]
        The kernels of those that are not fused.
    product : RowsProduct | None
        The same as rows and a product of them, where it has that form.
    """

    name: str
    work: Work | TileWork
    passes: tuple[Pass, ...] = ()
    product: RowsProduct | None = None

    @property
    def family(self) -> str:
        """``"stream"`` or ``"tiles"``: the whole has kernels of one of them."""
        return STREAM if isinstance(self.work, Work) else TILES

    @property
    def families(self) -> tuple[str, ...]:
        """All families that it has kernels of: no lowering of tiles makes rows of a product."""
        return (self.family,) if self.product is None else (ROWS,)

    @property
    def separate(self) -> int:
        """Kernels that compute it if it is not fused."""
        return len(self.passes)


def cascade_shape(site: Site, derivation: Derivation, name: str = "cascade") -> CascadeShape:
    """Count a cascade of a function.

    Parameters
    ----------
    site : Site
        The cascade in its function.
    derivation : Derivation
        How it streams.
    name : str
        What it is called.

    Raises
    ------
    CascadeRefused
        If it has products, and no tile form.
    """
    from crossfuse.cascade.rewrite.passes import passes_of
    from crossfuse.cascade.rewrite.tiled.operands import has_products
    from crossfuse.cascade.rewrite.tiled.work import tile_work_of
    from crossfuse.cascade.rewrite.work import work_of

    count = tile_work_of if has_products(site) else work_of
    product = rows_product_of(site.function) if has_products(site) else None
    return CascadeShape(name, count(site, derivation), passes_of(site), product)


def shape_of_cascade(source: str | CascadeSpec) -> CascadeShape:
    """Count a packaged cascade.

    Parameters
    ----------
    source : str | CascadeSpec
        Such as ``"R7"`` or ``"softmax:rows=64,cols=1024"``.

    Raises
    ------
    WorkloadRefused, CascadeRefused
        For what is no cascade, or cannot stream.
    """
    from crossfuse.cascade.algebra import derive
    from crossfuse.cascade.detect import detect
    from crossfuse.workload.cascade_build import prim_func
    from crossfuse.workload.cascades import resolve

    spec = resolve(source) if isinstance(source, str) else source
    (site,) = detect(prim_func(spec))
    return cascade_shape(site, derive(site.cascade), str(spec))
