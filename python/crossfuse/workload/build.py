"""Unscheduled functions of workloads, written in TE.

One canonical form serves specs and imported models, so every later stage reads one shape of
program: `prim_func` emits it from a spec, `crossfuse.relax` from a graph, both through `emit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tvm import te, tirx

from crossfuse.calls import checked
from crossfuse.hardware import TMA_PITCH
from crossfuse.markers import UNPADDED, UNPADDED_COLUMNS
from crossfuse.workload.conv_chain import ConvChainSpec
from crossfuse.workload.dtypes import Operand, float_type
from crossfuse.workload.expression import Algebra, evaluate
from crossfuse.workload.spec import LayersSpec, WorkloadSpec, affine

# Gets the tensors by name and the two indices; returns a float32 expression.
Elementwise = Callable[[Mapping[str, te.Tensor], Any, Any], Any]

TIR = Algebra(
    constant=lambda value: tirx.const(value, "float32"),
    functions={
        "exp": tirx.exp,
        "tanh": tirx.tanh,
        "sigmoid": tirx.sigmoid,
        "erf": tirx.erf,
        "sqrt": tirx.sqrt,
        "abs": tirx.abs,
        "max": tirx.max,
        "min": tirx.min,
    },
)
_REDUCE = {
    "sum": te.sum,
    "max": te.max,
    "min": te.min,
    "prod": te.comm_reducer(lambda x, y: x * y, lambda dtype: tirx.const(1, dtype), name="prod"),
}


@dataclass(frozen=True)
class Product:
    """A matrix product by a stored weight."""

    #: Of the block, and of the float32 buffer that it writes.
    name: str
    weight: Operand
    #: ``"kn"`` when the weight is [K, N], ``"nk"`` when it is [N, K].
    layout: str
    #: The reduction.
    combine: str = "sum"
    #: Columns of the product; 0 for as many as the weight has, whose rows may be longer.
    width: int = 0

    @property
    def columns(self) -> int:
        """Number of columns of the product."""
        return self.width or self.weight.shape[self.layout == "kn"]


@dataclass(frozen=True)
class Layer:
    """Products of an intermediate, and what is made of them."""

    #: One, or gate and up.
    products: tuple[Product, ...]
    #: Makes the next intermediate, in A's type.
    element: Elementwise


#: Names of the blocks that `Scaled` adds.
ROW_SUM, ROWS = "row_sum", "rows"


@dataclass(frozen=True)
class Scaled:
    """Rows of the left operand made of A's, each by a factor that follows from a sum over the row.

    An RMS norm makes such rows. Its factor is taken out of the product, whose rows are scaled
    instead: elements can be multiplied before the sum is known.
    """

    #: What is summed over the elements of a row of A.
    term: Elementwise
    #: An element of the left operand but for the factor; it is rounded to A's type.
    element: Elementwise
    #: What epilogues read, from an element of the product and the sum of its row.
    scale: Callable[[Any, Any], Any]

    def row_sum(
        self, tensors: Mapping[str, te.Tensor], left: te.Tensor, end: str = ""
    ) -> te.Tensor:
        """The sums, one a row."""
        k = te.reduce_axis((0, left.shape[1]), "k")

        def total(i: Any) -> Any:
            return te.sum(self.term(tensors, i, k), axis=k)

        return te.compute((left.shape[0],), total, name=f"{ROW_SUM}{end}")

    def rows(self, tensors: Mapping[str, te.Tensor], left: te.Tensor, end: str = "") -> te.Tensor:
        """The left operand, which a schedule computes where it loads A."""
        return _elementwise(left.shape, left.dtype, self.element, tensors, f"{ROWS}{end}")

    def behind(self, product: te.Tensor, row_sum: te.Tensor) -> Callable[[Any, Any], Any]:
        """The product as the epilogue reads it."""
        return lambda i, j: self.scale(product(i, j), row_sum(i))


@dataclass(frozen=True)
class Form:
    """The choices that the canonical form leaves open."""

    #: A, [M, K]; images [batch, H, W, channels] if there is a window.
    left: Operand
    #: Products of A: one, or gate and up.
    first: tuple[Product, ...]
    #: Makes the intermediate from the first products, in A's type. None exactly when `second` is.
    middle: Elementwise | None
    #: The product of the intermediate; None when there are only products of A.
    second: Product | None
    #: Makes the output from the last product, or from gate and up where these are all.
    epilogue: Elementwise
    #: Further operands of `middle` and `epilogue`: scales, biases, residuals.
    extras: tuple[Operand, ...]
    #: Type of the output.
    out: str
    #: Rows and columns of the windows of the images that are the rows of A; 0 for a matrix.
    window: int = 0
    #: Layers between the first products and `second`, if there are more than two in all.
    inner: tuple[Layer, ...] = ()
    #: How the rows of one layer are made of A's; None where they are A's.
    scaled: Scaled | None = None

    @property
    def products(self) -> tuple[Product, ...]:
        """All products in order."""
        inner = (product for each in self.inner for product in each.products)
        return (*self.first, *inner, *((self.second,) if self.second else ()))

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Inputs of the function in order."""
        return (self.left, *(each.weight for each in self.products), *self.extras)

    @property
    def columns(self) -> tuple[int, ...]:
        """Columns of A and of every intermediate; of a single product those of its result."""
        layers = (self.first, *(each.products for each in self.inner))
        return (self.left.shape[-1], *(products[0].columns for products in layers))


@checked
def prim_func(spec: WorkloadSpec | LayersSpec) -> tirx.PrimFunc:
    """Make the unscheduled function of a workload.

    Parameters
    ----------
    spec : WorkloadSpec | LayersSpec
        What it computes.

    Returns
    -------
    tvm.tirx.PrimFunc
        In s_tir form; see `emit`. Its parameters are the spec's inputs in order, then the output.

    Examples
    --------
    >>> from crossfuse.workload import parse
    >>> func = prim_func(parse("gemm:M=16,K=64,N=32"))
    >>> [str(each.name) for each in func.params]
    ['A', 'B', 'out']
    """
    return emit(form_of(spec))


def form_of(spec: WorkloadSpec | LayersSpec) -> Form:
    """The form of a workload, with operands in the order of the spec's inputs."""
    if isinstance(spec, LayersSpec):
        return _of_layers(spec)
    a, *others = spec.operands
    weights, extras = others[: len(spec.products)], tuple(others[len(spec.products) :])
    *first, last = every = [
        Product(name, weight, spec.weights, spec.combine)
        for name, weight in zip(spec.products, weights, strict=True)
    ]
    elements = [_finished(each, *affine(spec, each)) for each in spec.products]
    middle = _activated(spec.act, elements[0])
    if spec.gated:
        middle = _multiplied(middle, elements[1])
    epilogue = elements[-1] if spec.L else middle
    if spec.residual:
        epilogue = _with_residual(epilogue)
    if not spec.L:
        return Form(a, tuple(every), None, None, epilogue, extras, spec.out)
    window = spec.k1 if isinstance(spec, ConvChainSpec) else 0
    return Form(a, tuple(first), middle, last, epilogue, extras, spec.out, window)


def _of_layers(spec: LayersSpec) -> Form:
    """The form of a row of layers: A, weights W0, W1 and so on, biases, the residual."""
    products, extras, elements = [], [], []
    for number, (depth, width) in enumerate(pairwise(spec.widths)):
        name, bias = f"gemm{number}", f"bias{number}" if spec.bias else ""
        shape = (width, depth) if spec.weights == "nk" else (depth, width)
        products.append(Product(name, Operand(f"W{number}", shape, spec.dtype), spec.weights))
        extras += [Operand(bias, (width,), spec.dtype)] if bias else []
        elements.append(_finished(name, bias=bias))
    *others, epilogue = elements
    if spec.residual:
        epilogue = _with_residual(epilogue)
        extras.append(Operand("residual", (spec.M, spec.widths[-1]), spec.dtype))
    first, *activated = (_activated(spec.act, each) for each in others)
    inner = zip(products[1:-1], activated, strict=True)
    return Form(
        Operand("A", (spec.M, spec.widths[0]), spec.dtype),
        (products[0],),
        first,
        products[-1],
        epilogue,
        tuple(extras),
        spec.out,
        inner=tuple(Layer((product,), element) for product, element in inner),
    )


def _finished(product: str, scale: str = "", bias: str = "") -> Elementwise:
    """The element of a product with its scale and its bias, if these have names."""

    def element(tensors: Mapping[str, te.Tensor], i: Any, j: Any) -> Any:
        value = tensors[product](i, j)
        if scale:
            value = value * tensors[scale](0)
        return value + _cast(tensors[bias](j), "float32") if bias else value

    return element


def _activated(act: str, value: Elementwise) -> Elementwise:
    return lambda tensors, i, j: evaluate(act, value(tensors, i, j), TIR)


def _multiplied(left: Elementwise, right: Elementwise) -> Elementwise:
    return lambda tensors, i, j: left(tensors, i, j) * right(tensors, i, j)


def _with_residual(value: Elementwise) -> Elementwise:
    return lambda tensors, i, j: value(tensors, i, j) + _cast(tensors["residual"](i, j), "float32")


def emit(form: Form) -> tirx.PrimFunc:
    """Write a function in the canonical form.

    Blocks in order, each under its own loops, all buffers row-major:

    1. for each first product ``gemm0`` (gated: ``gemm0_gate``, ``gemm0_up``): float32 [M, N]
       reduced over K, reading A and the weight in their stored layout through casts;
    2. ``hidden``: the whole expression between the products, in float32, cast to A's type;
    3. ``gemm1``: float32 [M, L] reduced over N, reading ``hidden`` through a cast;
    4. ``out``: the epilogue in float32, cast to the output type.

    Without a second product, 2 and 3 are absent and ``out`` reads the first ones. With inner
    layers, their products and ``hidden1``, ``hidden2`` and so on stand between 2 and 3. With a
    window, a block ``windows`` [M, K] comes first, which reads the images at the pixels of each
    row's window and is 0 beyond them; the product reads it in the place of A. A schedule computes
    it where it stages the operand. With scaled rows, blocks ``row_sum`` [M] and ``rows`` [M, K]
    come first: products read the latter, and what follows them multiplies by the factors.

    Parameters are A, weights in the order of the products, extras, output.
    """
    tensors = {o.name: te.placeholder(o.shape, o.dtype, o.name) for o in form.operands}
    parameters = list(tensors.values())
    left = tensors[form.left.name]
    if form.window:
        left = _windows(left, form.window)
    last = _first_products(form, tensors, left)
    if form.second and form.middle:
        hidden = _elementwise(last.shape, form.left.dtype, form.middle, tensors, "hidden")
        for number, layer in enumerate(form.inner, 1):
            for product in layer.products:
                last = tensors[product.name] = _multiply(hidden, tensors, product)
            made = (form.left.dtype, layer.element, tensors, f"hidden{number}")
            hidden = _elementwise(last.shape, *made)
        last = tensors[form.second.name] = _multiply(hidden, tensors, form.second)
    output = _elementwise(last.shape, form.out, form.epilogue, tensors, "out")
    made = te.create_prim_func([*parameters, output])
    return made if form.scaled is None else _sums_first(made)


def _sums_first(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put sums of rows in front of all else, which schedules bring into one loop."""
    from crossfuse import _tvm as ir

    root = func.body.block
    names = {each: str(ir.nodes(each, ir.SBlock)[0].name_hint) for each in root.body.seq}
    order = sorted(root.body.seq, key=lambda each: not names[each].startswith(ROW_SUM))
    realize = ir.SBlockRealize([], func.body.predicate, ir.block_like(root, body=ir.SeqStmt(order)))
    return ir.with_body(func, realize)


def _first_products(
    form: Form, tensors: dict[str, Any], left: te.Tensor, end: str = ""
) -> te.Tensor:
    """Multiply A, by names with an `end`; epilogues find the products in `tensors`, scaled."""
    row_sum, rows = None, left
    if form.scaled is not None:
        row_sum = form.scaled.row_sum(tensors, left, end)
        rows = form.scaled.rows(tensors, left, end)
    for each in form.first:
        made = _multiply(rows, tensors, replace(each, name=f"{each.name}{end}"))
        tensors[each.name] = form.scaled.behind(made, row_sum) if form.scaled else made
    return made


def emit_products(forms: Sequence[Form]) -> tirx.PrimFunc:
    """Write several products of one operand as one function, each with an output of its own.

    Forms are of one product and the same left operand. Blocks of each are those of `emit`, one form
    behind the other, under names that end in the number of the form. Parameters are A, then weight
    and extras form by form, then the outputs.
    """
    left = forms[0].left
    shared = te.placeholder(left.shape, left.dtype, left.name)
    given: list[te.Tensor] = [shared]
    made: list[te.Tensor] = []
    for number, form in enumerate(forms):
        tensors = {left.name: shared}
        for each in form.operands[1:]:
            tensors[each.name] = te.placeholder(each.shape, each.dtype, f"{each.name}_{number}")
            given.append(tensors[each.name])
        result = _first_products(form, tensors, shared, f"_{number}")
        element = (result.shape, form.out, form.epilogue, tensors, f"out_{number}")
        made.append(_elementwise(*element))
    func = te.create_prim_func([*given, *made])
    return _sums_first(func) if any(each.scaled for each in forms) else func


def _windows(images: te.Tensor, k: int) -> te.Tensor:
    """The windows of images [batch, H, W, channels] as a matrix, see `workload.conv_chain`."""
    batch, height, width, channels = images.shape

    def element(p: Any, q: Any) -> Any:
        # Divided by one extent after the other: TVM's analyzer proves no more than it must.
        y = p // width % height + q // (channels * k) - k // 2
        x = p % width + q // channels % k - k // 2
        pixel = images(p // (height * width), y, x, q % channels)
        if k == 1:
            return pixel
        inside = tirx.all(y >= 0, y < height, x >= 0, x < width)
        return tirx.if_then_else(inside, pixel, tirx.const(0, images.dtype))

    return te.compute((batch * height * width, channels * (k * k)), element, name="windows")


def _multiply(left: te.Tensor, tensors: Mapping[str, te.Tensor], product: Product) -> te.Tensor:
    right = tensors[product.weight.name]
    by_row = product.layout == "nk"
    k = te.reduce_axis((0, left.shape[1]), "k")
    reduce = _REDUCE[product.combine]

    def element(i: Any, j: Any) -> Any:
        factor = right(j, k) if by_row else right(k, j)
        return reduce(_cast(left(i, k), "float32") * _cast(factor, "float32"), axis=k)

    return te.compute((left.shape[0], product.columns), element, name=product.name)


def _elementwise(
    shape: Any, dtype: str, function: Elementwise, tensors: Mapping[str, te.Tensor], name: str
) -> te.Tensor:
    return te.compute(shape, lambda i, j: _cast(function(tensors, i, j), dtype), name=name)


def _cast(value: Any, dtype: str) -> Any:
    return value.astype(dtype)


# Forms with operands padded so that rows begin on multiples of 16 bytes, which TMA needs.
#
# Of a chain of extents such as 65 and 131, operands are copied to rows of 72 and 136, with zeros at
# the ends, and products sum over as many elements. The output keeps its columns.


def aligned(form: Form, stored: Container[str] = ()) -> tirx.PrimFunc | None:
    """The function of a form on padded operands; None if there is nothing to pad for TMA.

    Its root block is annotated with the shapes that callers pass, see
    `crossfuse.lower.extract`: operands that are `stored` by name come with zeros at the ends of
    their rows, such as weights that were padded once; the others are copied in each call.

    Examples
    --------
    >>> from crossfuse.workload import parse
    >>> from crossfuse.workload.build import form_of
    >>> func = aligned(form_of(parse("gemm:M=16,K=65,N=131,dtype=bfloat16")))
    >>> [tuple(map(int, each.ty.shape)) for each in func.params]
    [(16, 72), (72, 136), (16, 131)]
    """
    item = float_type(form.left.dtype).numpy.itemsize
    inner = form.columns[1:] if form.second else ()
    # A further operand of one column may be of an intermediate that has one, or the same for all.
    unclear = 1 in inner and bool(form.extras)
    if form.window or form.scaled or item > 2 or unclear or form.first[0].combine != "sum":
        return None
    step = TMA_PITCH // item
    left = _wide(form.left, step)
    # Columns of the input and of each intermediate, with those that are padding.
    depths = (left.shape[1], *(math.ceil(each / step) * step for each in inner), 0)
    middle, between = form.middle, tuple(each.element for each in form.inner)
    elements = [
        made and (_zero_behind(made, columns) if width > columns else made)
        for made, columns, width in zip((middle, *between), inner, depths[1:], strict=False)
    ]
    layers = zip(form.inner, elements[1:], depths[1:], depths[2:], strict=False)
    found = replace(
        form,
        left=left,
        first=tuple(_product(each, depths[0], depths[1], step) for each in form.first),
        middle=elements[0] if elements else None,
        inner=tuple(
            Layer(tuple(_product(each, depth, width, step) for each in layer.products), made)
            for layer, made, depth, width in layers
            if made
        ),
        second=form.second and _product(form.second, depths[-2], 0, step),
        extras=tuple(_wide(e, step) if e.shape[-1] in inner else e for e in form.extras),
    )
    if found.operands == form.operands:
        return None
    pairs = zip(form.operands, found.operands, strict=True)
    return _noted(emit(found), [_passed(*each, stored) for each in pairs], form.columns)


def _passed(short: Operand, wide: Operand, stored: Container[str]) -> tuple[int, ...]:
    """The shape that callers pass: never of more rows, since TMA loads zeros behind the last."""
    return (*short.shape[:-1], wide.shape[-1]) if short.name in stored else short.shape


def _wide(operand: Operand, step: int) -> Operand:
    """An operand with rows padded to a multiple of `step` elements."""
    *outer, inner = operand.shape
    return replace(operand, shape=(*outer, math.ceil(inner / step) * step))


def _product(product: Product, depth: int, width: int, step: int) -> Product:
    """A product that sums over `depth` elements of wider rows; `width` 0 keeps its columns."""
    weight, width = _wide(product.weight, step), width or product.columns
    rows = depth if product.layout == "kn" else width
    weight = replace(weight, shape=(rows, weight.shape[1]))
    return replace(product, weight=weight, width=width)


def _zero_behind(middle: Elementwise, columns: int) -> Elementwise:
    """An intermediate whose padding columns are zero, whatever its row holds.

    An infinite input times the zeros of a weight would be NaN, and NaN times zero is NaN again.
    """

    def element(tensors: Mapping[str, Any], i: Any, j: Any) -> Any:
        return tirx.if_then_else(j < columns, middle(tensors, i, j), tirx.const(0, "float32"))

    return element


def _noted(func: tirx.PrimFunc, shapes: list[tuple[int, ...]], columns: tuple[int, ...]) -> Any:
    """A function with the shapes of its inputs as callers pass them, and columns without zeros."""
    from crossfuse import _tvm as ir

    sch = ir.Schedule(func)
    root = sch.get_sblock("root")
    sch.annotate(root, UNPADDED, ";".join(",".join(map(str, shape)) for shape in shapes))
    sch.annotate(root, UNPADDED_COLUMNS, ",".join(map(str, columns)))
    (noted,) = sch.mod.functions.values()
    return noted
