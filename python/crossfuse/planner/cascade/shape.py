"""A cascade as the planner sees it: counted work, without functions or expressions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from crossfuse.cascade.rewrite.work import Pass, TileWork, Work
from crossfuse.hardware import Device
from crossfuse.planner.cascade.rows_product import RowsProduct, rows_chain_of, rows_product_of
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.kernels.shape import Shape, shape_of

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.site import Site
    from crossfuse.workload.cascade_spec import CascadeSpec


@dataclass(frozen=True)
class OutputProduct:
    """A product whose left operand a stream of tiles makes."""

    #: One product, of heads and of weights.
    chain: Chain
    #: Whether weights are stored as [n, k].
    k_major: bool

    @cached_property
    def shape(self) -> Shape:
        """Extents of the product."""
        return shape_of(self.chain, k_major=self.k_major)

    @property
    def hbm_bytes(self) -> int:
        """Bytes of weights, of what epilogues read, and of the output, once each."""
        left = self.chain.products[0].left
        ends = [each for each in self.chain.tensors if each.name != left]
        return sum(self.chain.elements(e.name) * e.item // e.repeats for e in ends)


@dataclass(frozen=True)
class CascadeShape:
    """Counted work of a cascade, fused and unfused."""

    #: Text of the spec, or what else it is called.
    name: str
    #: Of a stream of threads, or of tiles with products.
    work: Work | TileWork
    #: The kernels that compute it if it is not fused.
    passes: tuple[Pass, ...] = ()
    #: The same as rows and a product of them; None of a cascade of another form.
    product: RowsProduct | None = None
    #: The product of what it makes; None where nothing follows.
    after: OutputProduct | None = None

    @property
    def separate(self) -> int:
        """Number of kernels that compute it if it is not fused."""
        return len(self.passes)


def cascade_shape(site: Site, derivation: Derivation, name: str = "cascade") -> CascadeShape:
    """Count the work of a cascade in its function; refuses products without a tile form."""
    from crossfuse.cascade.rewrite.tiled.tile_context import has_products
    from crossfuse.cascade.rewrite.work import passes_of, tile_work_of, work_of

    count = tile_work_of if has_products(site) else work_of
    if site.after is not None:
        after = _output_product(site.after.product)
        passes = (*passes_of(site), _pass_of(after))
        return CascadeShape(name, count(site, derivation), passes, after=after)
    of = rows_product_of if has_products(site) else rows_chain_of
    product = of(site.function)
    passes = product.passes if product is not None and product.is_chain else passes_of(site)
    return CascadeShape(name, count(site, derivation), passes, product)


def _output_product(func: Any) -> OutputProduct:
    from crossfuse import _tvm as ir
    from crossfuse.blocks.chain import read_chain
    from crossfuse.planner.extract.chain import chain_from

    return OutputProduct(chain_from(func), read_chain(ir.Schedule(func)).k_major)


def _pass_of(after: OutputProduct) -> Pass:
    """The product as a kernel of its own."""
    chain, shape = after.chain, after.shape
    written = shape.m * shape.n * shape.out
    read = after.hbm_bytes - written + shape.m * shape.k * shape.item
    return Pass("product", read, written, chain.flops)


def shape_of_cascade(source: str | CascadeSpec) -> CascadeShape:
    """Count a packaged cascade, such as ``"R7"`` or ``"softmax:rows=64,cols=1024"``."""
    from crossfuse.cascade.algebra import derive
    from crossfuse.cascade.rewrite.rows_first import sites_of
    from crossfuse.workload.cascade_build import prim_func
    from crossfuse.workload.cascades import resolve

    spec = resolve(source) if isinstance(source, str) else source
    (site,) = sites_of(prim_func(spec))
    return cascade_shape(site, derive(site.cascade), str(spec))


# Throughput of SMs beside products: special functions, and plain arithmetic.
#
# Both run at the clock that products leave. The measured rate of products tells how low it falls: a
# dense product of 16-bit floats takes 4096 operations of an SM in a cycle (NVIDIA H100 white paper:
# 989 TFLOP/s of 132 SMs at 1830 MHz).

#: Operations of an SM's tensor cores in a cycle, of two bytes an element.
_PER_CYCLE = 4096
#: Cycles of a microsecond without load: what `nvidia-smi` says of an H100 SXM, and it held 1980 MHz
#: in softmax, decoding and short attention.
BOOST = 1980.0
#: Results of an SM in a cycle: CUDA programming guide, arithmetic instructions, capability 9.0.
SPECIAL, LANES = 16, 128


def clock(rates: Rates, *, dense: float = 0.0) -> float:
    """Cycles per microsecond under load; `dense` is the part of the time with tensor cores at work.

    With tensor cores at work all the time it falls to about 1600.
    """
    loaded = float(rates.tensor_rate(128, 256, 2)) / _PER_CYCLE
    return BOOST - (BOOST - loaded) * dense


def special_time(count: float, device: Device, rates: Rates) -> float:
    """Microseconds of exponentials, logarithms and roots on all SMs."""
    return count / (SPECIAL * device.sms * clock(rates))


def lanes_time(count: float, device: Device, rates: Rates) -> float:
    """Microseconds of additions, products and comparisons of float32 on all SMs."""
    return count / (LANES * device.sms * clock(rates))
