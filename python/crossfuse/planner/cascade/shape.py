"""A cascade as the planner sees it: counted work, without functions or expressions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from crossfuse.cascade.rewrite.work import Pass, TileWork, Work
from crossfuse.hardware import Device
from crossfuse.planner.chain.build import chain_of_blocks
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.kernels.shape import Shape, shape_of
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.cascades import RowsGradient

if TYPE_CHECKING:
    from crossfuse.cascade.rewrite.rows_first import RowsFirst
    from crossfuse.cascade.spec import Derivation, Site
    from crossfuse.workload.cascade_spec import CascadeSpec


#: Elements of a chunk of a row: of 512 and 1024 kernels written by hand took 93.7 and 94.3 us.
CHUNK = 512


@dataclass(frozen=True)
class OutputProduct:
    """Products whose first left operand a cascade makes; behind a stream of tiles it is one."""

    chain: Chain
    #: Whether weights are stored as [n, k].
    k_major: bool

    @cached_property
    def shape(self) -> Shape:
        """Extents of the products."""
        return shape_of(self.chain, k_major=self.k_major)

    @property
    def hbm_bytes(self) -> int:
        """Bytes of weights, of what epilogues read, and of the output, once each."""
        left = self.chain.products[0].left
        ends = [e for e in self.chain.tensors if e.name != left and e.role != "intermediate"]
        return sum(self.chain.stored_bytes(each.name) for each in ends)


@dataclass(frozen=True)
class RowsProduct(OutputProduct):
    """Rows that a cascade makes, and the products that load them: one, or several in a chain."""

    #: Work of the cascade that makes the rows.
    rows: Work
    #: Elements of the chunks that rows can be made in; 0 if they are made as a whole alone.
    chunk: int = 0
    #: Whether CTAs can share the product's reduction: not where its epilogue reads what else the
    #: cascade makes, such as scales of rows.
    splits: bool = True

    @property
    def is_chain(self) -> bool:
        """Whether there are several products."""
        return len(self.chain.products) > 1

    @property
    def hbm_bytes(self) -> int:
        """Bytes of inputs and output, once each: what makes the rows counts instead of the rows."""
        rows = self.rows
        return super().hbm_bytes + rows.rows * rows.length * (rows.read + rows.late)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The kernels if a chain is not fused, in order.

        Rows are one: libraries have kernels of norms. The others are as
        `crossfuse.planner.cost.estimate.eager` counts them: weights of one operand are one product,
        whose results an activation and a multiplication make the intermediate of.
        """
        chain, rows = self.chain, self.rows
        read = rows.rows * rows.length * (rows.read + rows.late)
        found = [Pass(f"{chain.products[0].left}, rows", read, self.left_bytes)]
        for product in chain.products:
            inputs = (product.left, *product.rights, *product.further)
            read, made = sum(map(chain.stored_bytes, inputs)), chain.stored_bytes(product.output)
            count, depth = len(product.rights), chain.extents[product.reduction]
            flops = 2 * count * chain.elements(product.output) * depth
            found.append(Pass(f"{product.output} by {inputs[1]}", read, count * made, flops))
            if product.output != chain.output.name:
                found += [
                    Pass(f"{product.output}, {n} of {count}", made, made) for n in range(count)
                ]
        return tuple(found)

    @property
    def left_bytes(self) -> int:
        """Bytes of the rows as they are stored for the product."""
        return self.rows.rows * self.rows.length * self.rows.written


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
    #: Sums of each column over the rows, beside what rows make.
    sums: int = 0

    @property
    def rows_products(self) -> int:
        """Number of products that load the rows which it makes; 0 of a cascade of another form."""
        return 0 if self.product is None else len(self.product.chain.products)

    @property
    def separate(self) -> int:
        """Number of kernels that compute it if it is not fused."""
        return len(self.passes)


def cascade_shape(site: Site, derivation: Derivation, name: str = "cascade") -> CascadeShape:
    """Count the work of a cascade in its function; refuses products without a tile form."""
    from crossfuse.cascade.rewrite.work import passes_of, tile_work_of, work_of

    count = tile_work_of if site.has_products else work_of
    if site.after is not None:
        after = _output_product(site.after.product)
        passes = (*passes_of(site), _pass_of(after))
        return CascadeShape(name, count(site, derivation), passes, after=after)
    if site.sums is not None:
        sums = len(site.sums.sums)
        return CascadeShape(name, count(site, derivation), passes_of(site), sums=sums)
    of = rows_product_of if site.has_products else rows_chain_of
    product = of(site.function)
    passes = product.passes if product is not None and product.is_chain else passes_of(site)
    return CascadeShape(name, count(site, derivation), passes, product)


def _output_product(func: Any) -> OutputProduct:
    from crossfuse import _tvm as ir
    from crossfuse.blocks.chain import read_chain

    found = read_chain(ir.Schedule(func))
    return OutputProduct(chain_of_blocks(found), found.k_major)


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
    from crossfuse.planner.cascade.shape import function_of
    from crossfuse.workload.cascades import resolve

    spec = resolve(source) if isinstance(source, str) else source
    (site,) = sites_of(function_of(spec))
    return cascade_shape(site, derive(site.cascade), str(spec))


def chunk_of(parts: Any, site: Any, derivation: Any) -> int:
    """Elements of a chunk by which the rows of a function can be made; 0 if they cannot.

    `parts` is a `crossfuse.cascade.rewrite.rows_first.RowsFirst`, the others the cascade of its
    rows.
    """
    from crossfuse.cascade.rewrite.row_chunks import row_chunks
    from crossfuse.errors import CascadeRefused

    try:
        return CHUNK if row_chunks(parts, site, derivation, CHUNK).chunks > 1 else 0
    except CascadeRefused:
        return 0


def rows_product_of(func: Any) -> RowsProduct | None:
    """Count an unscheduled function whose last product reads rows that a cascade makes.

    None of a function of another form, and of rows that do not stream.
    """
    from crossfuse.cascade.rewrite.rows_first import rows_first

    return _counted(rows_first(func), chunks=True)


def rows_chain_of(func: Any) -> RowsProduct | None:
    """Count an unscheduled function of rows that a cascade makes, and a chain of products of them.

    None as of `rows_product_of`.
    """
    from crossfuse.cascade.rewrite.rows_first import rows_before_chain

    return _counted(rows_before_chain(func), chunks=False)


def _counted(parts: RowsFirst | None, *, chunks: bool) -> RowsProduct | None:
    from crossfuse import _tvm as ir
    from crossfuse.blocks.chain import read_chain
    from crossfuse.cascade.algebra import derive
    from crossfuse.cascade.detect import detect
    from crossfuse.cascade.rewrite.streaming import streaming
    from crossfuse.cascade.rewrite.work import work_of
    from crossfuse.errors import CascadeRefused, PlanRefused, ScheduleRefused

    if parts is None:
        return None
    try:
        sites = detect(parts.rows)
        if len(sites) != 1:
            return None
        derivation = derive(sites[0].cascade)
        streaming(sites[0], derivation)
        found = read_chain(ir.Schedule(parts.product))
        rows = work_of(sites[0], derivation)
        chunk = chunk_of(parts, sites[0], derivation) if chunks else 0
        splits = len(parts.passed) == 1
        return RowsProduct(chain_of_blocks(found), found.k_major, rows, chunk, splits)
    except (CascadeRefused, PlanRefused, ScheduleRefused):
        return None


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


# The functions that specs of cascades stand for.


def function_of(spec: CascadeSpec) -> Any:
    """The unscheduled s_tir function of a cascade; that of a gradient is derived.

    Its parameters are the spec's operands in order, then the outputs.
    """
    from crossfuse.autodiff.differentiate import gradients
    from crossfuse.workload.cascade_build import prim_func

    if not isinstance(spec, RowsGradient):
        return prim_func(spec)
    func = gradients(prim_func(spec.of), wrt=[spec.of.operands[0].name]).function
    wanted = [each.name for each in (*spec.operands, *spec.outputs)]
    assert [str(each.name) for each in func.params] == wanted
    return func
