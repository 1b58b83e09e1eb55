"""Reads the blocks of a canonical function: products one behind another, expressions between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import (
    bindings,
    combiner,
    function,
    is_reduction,
    name_of,
    reduces,
    written_buffer,
)
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.workload.expression import CYCLES

# How operands of a product lie in memory, and which are views of an input.


def is_view(sch: Any, block: Any) -> bool:
    """Whether a block only copies an input at other indices, with zeros outside its bounds.

    Windows of a convolution are such views. They are no part of a chain of products: the operand is
    read at these indices wherever it is staged.
    """
    body = sch.get(block).body
    if sch.get_producers(block) or reduces(sch, block) or not isinstance(body, ir.BufferStore):
        return False
    value = body.value
    if isinstance(value, ir.Call) and str(getattr(value.op, "name", "")) == ir.IF_THEN_ELSE:
        _, value, otherwise = value.args
        if not isinstance(otherwise, ir.tirx.FloatImm) or float(otherwise.value) != 0:
            return False
    return isinstance(value, ir.TensorLoad)


def _of_inputs(sch: Any, consumer: Any) -> list[Any]:
    """Blocks that make what a block reads of rows of inputs: rows again, or sums over them."""

    def is_of_inputs(block: Any) -> bool:
        if sch.get_producers(block) or not isinstance(sch.get(block).body, ir.BufferStore):
            return False
        axes = [var for var, _ in bindings(sch, block)]
        spatial = [each for each in axes if not is_reduction(each)]
        if len(spatial) != (1 if reduces(sch, block) else 2) or is_view(sch, block):
            return False
        return _reads_in_place(sch.get(block), axes[0].var, axes[-1].var)

    return [each for each in sch.get_producers(consumer) if is_of_inputs(each)]


def _reads_in_place(block: Any, row: Any, column: Any) -> bool:
    """Whether elements are made of those at the same place, or of one for each row or column."""
    stored = block.writes[0].source
    for load in ir.buffer_loads(block.body.value):
        *outer, last = load.indices
        known = [each for each in outer if not each.same_as(row)]
        known += [] if last.same_as(column) or (not outer and last.same_as(row)) else [last]
        if not load.source.same_as(stored) and any(ir.constant(each) is None for each in known):
            return False
    return True


def is_k_major(sch: Any, consumer: Any, index: int) -> bool:
    """Whether the weights that a block multiplies its read `index` by are stored as [n, k]."""
    weights = sch.get(consumer).reads[1 - index]
    reduced = [each.var for each in sch.get(consumer).iter_vars if is_reduction(each)]
    inner = list(ir.variables(weights.region[-1].min))
    return any(each.same_as(var) for each in inner for var in reduced)


@dataclass(frozen=True)
class Further:
    """An input that an epilogue reads besides the sums: a scale, a bias, a residual."""

    #: Whether each row of the result, and each column, has elements of its own.
    parts: tuple[str, ...]
    #: Bytes of an element, and elements.
    item: int
    elements: int


@dataclass(frozen=True)
class Layer:
    """Products of one operand, and what is made of them."""

    #: One, or gate and up.
    products: tuple[Any, ...]
    #: The elementwise block that stores what is made of them.
    epilogue: Any
    #: Columns of each product, and the extent that it sums over.
    columns: int
    depth: int
    #: The reduction of the products: ``"sum"``, but for products of other algebras.
    combine: str
    #: Bytes of an element of the weights of each product, and of what is stored.
    weights: tuple[int, ...]
    item: int
    #: In the order of the parameters.
    further: tuple[Further, ...]
    #: Cycles of the epilogue's functions, see `function_cycles`.
    functions: int


@dataclass(frozen=True)
class Chain:
    """Layers of a canonical function in order; each multiplies what the one before it stores."""

    layers: tuple[Layer, ...]
    #: Rows.
    m: int
    #: Bytes of an element of the operands.
    item: int
    #: Times that each stored element of the first left operand stands in it, as in windows.
    repeats: int
    #: Whether weights are stored as [n, k].
    k_major: bool
    #: Blocks that make the rows which the first products multiply, element by element of the
    #: input's, and sums over rows of the input that an epilogue reads. Most functions have neither.
    rows: tuple[Any, ...] = ()
    row_sums: tuple[Any, ...] = ()

    @property
    def narrow(self) -> str:
        """A clause for messages where operands are no 16-bit floats, else empty."""
        return "" if self.item == 2 else f", with elements of {8 * self.item} bits"

    @property
    def products(self) -> tuple[Any, ...]:
        """All product blocks."""
        return tuple(product for each in self.layers for product in each.products)

    @property
    def epilogue(self) -> Any:
        """The elementwise block that writes the output."""
        return self.layers[-1].epilogue

    # Of one layer or two, as most rules take them.

    @property
    def first(self) -> tuple[Any, ...]:
        """Products of the input: one, or gate and up."""
        return self.layers[0].products

    @property
    def middle(self) -> Any:
        """The elementwise block between two layers; None with one."""
        return self.layers[0].epilogue if self.layers[1:] else None

    @property
    def second(self) -> Any:
        """The product of the intermediate; None with one layer."""
        return self.layers[1].products[0] if self.layers[1:] else None

    @property
    def n(self) -> int:
        """Width of the intermediate, or of the output of a single layer."""
        return self.layers[0].columns

    @property
    def k(self) -> int:
        """Reduction of the first products."""
        return self.layers[0].depth

    @property
    def l(self) -> int:  # noqa: E743  (the width of the second product)
        """Width of the output of the second layer; 0 with one."""
        return self.layers[1].columns if self.layers[1:] else 0


def read_layers(sch: Any, *, makes_rows: bool = False) -> Chain:
    """Find the layers of a function of products, with one elementwise block behind each.

    Any other function raises `ScheduleRefused`; `makes_rows` lets it make rows of the input's.
    """
    epilogue = _only(sch, list(sch.get_output_blocks("root")))
    products = _producers(sch, epilogue)
    if not _is_last(sch, products) or reduces(sch, epilogue):
        raise _refuse(sch, epilogue, "an output that is not an elementwise function of one product")
    found = [_layer(sch, products, epilogue)]
    while before := _producers(sch, products[0]):
        last = products[0]
        if len(before) != 1:
            raise _refuse(sch, last, f"{len(before)} computed operands of one product")
        if any(_names(sch, each) != _names(sch, last) for each in products):
            raise _refuse(sch, last, "products of one layer that multiply different intermediates")
        (block,) = before
        products = _producers(sch, block)
        if not products or reduces(sch, block) or any(combiner(sch, p) is None for p in products):
            raise _refuse(sch, block, "an intermediate that is not made of products of the inputs")
        found.insert(0, _layer(sch, products, block))
        rows, columns, _ = made = _extents(sch, products[0])
        behind = _extents(sch, last)
        if any(_extents(sch, p) != made for p in products) or behind[::2] != (rows, columns):
            raise _refuse(sch, last, "products whose extents do not follow from one another")
    return _checked(sch, _chain(sch, found), makes_rows)


def _checked(sch: Any, chain: Chain, makes_rows: bool) -> Chain:
    """A chain that was read, if a rule that knows rows of the input computes what it has."""
    every = chain.rows + chain.row_sums
    odd = [each for each in every if reduces(sch, each) != (each in chain.row_sums)]
    if not makes_rows or len(chain.layers) > 1 or len(chain.rows) > 1:
        odd = [*every]
    if odd:
        raise _refuse(sch, odd[0], "an operand that is made of the input's rows")
    return chain


def _chain(sch: Any, layers: Sequence[Layer]) -> Chain:
    """A chain of layers, with what the planner counts of it."""
    first = layers[0].products[0]
    rows, _, depth = _extents(sch, first)
    left = sch.get(first).reads[0].source
    views = [each for each in sch.get_producers(first) if written_buffer(sch, each).same_as(left)]
    stored = sch.get(views[0]).reads[0].source if views and is_view(sch, views[0]) else left
    repeats = max(rows * depth // ir.element_count(stored), 1)
    item, k_major = ir.item_bytes(left.ty.dtype), is_k_major(sch, first, 0)
    # Gate and up read the same ones.
    made = {name_of(sch, e): e for p in layers[0].products for e in _of_inputs(sch, p)}
    sums = tuple(each for layer in layers for each in _of_inputs(sch, layer.epilogue))
    return Chain(tuple(layers), rows, item, repeats, k_major, tuple(made.values()), sums)


def _is_last(sch: Any, products: list[Any]) -> bool:
    """Whether an output may be made of products: of one, or of gate and up of an input."""
    if len(products) == 1:
        return combiner(sch, products[0]) is not None
    operands = [sch.get(each).reads[0].source for each in products if combiner(sch, each)]
    if len(products) != 2 or len(operands) != 2 or any(_producers(sch, each) for each in products):
        return False
    first, second = (_extents(sch, each) for each in products)
    return first == second and operands[0].same_as(operands[1])


def _layer(sch: Any, products: list[Any], epilogue: Any) -> Layer:
    _, columns, depth = _extents(sch, products[0])
    blocks = [sch.get(each) for each in products]
    computed = [written_buffer(sch, e) for e in (*products, *_of_inputs(sch, epilogue))]
    stored = sch.get(epilogue)
    return Layer(
        tuple(products),
        epilogue,
        columns,
        depth,
        combiner(sch, products[0]) or "sum",
        tuple(ir.item_bytes(read.source.ty.dtype) for each in blocks for read in each.reads[1:2]),
        ir.item_bytes(stored.writes[0].source.ty.dtype),
        _further(stored, computed, function(sch).params),
        function_cycles(stored.body),
    )


def function_cycles(value: Any) -> int:
    """Cycles of a scheduler for the functions of a warp's elements.

    As `crossfuse.workload.expression.function_cycles` counts them in text.
    """
    found: dict[str, int] = {}

    def call(node: Any) -> None:
        name = str(getattr(node.op, "name", "")).removeprefix("tirx.")
        found[str(node)] = CYCLES.get(name, 0)

    def divide(node: Any) -> None:
        varies = not isinstance(node.b, ir.tirx.FloatImm)
        found[str(node)] = CYCLES["divide"] if varies else 0

    ir.walk(value, (ir.Call, call), (ir.tirx.Div, divide))
    return sum(found.values())


def _names(sch: Any, product: Any) -> set[str]:
    return {name_of(sch, each) for each in _producers(sch, product)}


def read_chain(sch: Any) -> Chain:
    """Find the roles of the blocks of one product, or of two with one elementwise block between.

    Any other function raises `ScheduleRefused`; see `read_layers` for more products.
    """
    found = read_layers(sch)
    if len(found.layers) > 2:
        block, count = found.layers[-2].epilogue, len(found.layers)
        raise _refuse(sch, block, f"{count} layers of products", _PAIR)
    return found


def read_two_products(sch: Any, rule: str) -> Chain:
    """As `read_chain`, but a single product raises `ScheduleRefused` in the name of `rule`."""
    chain = read_chain(sch)
    if chain.second is None:
        raise refuse(
            ScheduleRefused,
            "rule",
            f"{rule}, {name_of(sch, chain.first[0])}",
            found="a single product",
            limit="a chain of two products",
            instead="use schedule_tiled_gemm",
        )
    return chain


def read_product(sch: Any, rule: str) -> Chain:
    """As `read_chain`, but two products raise `ScheduleRefused` in the name of `rule`."""
    chain = _read_layer(sch, rule)
    if len(chain.first) > 1:
        raise refuse(
            ScheduleRefused,
            "rule",
            f"{rule}, {name_of(sch, chain.epilogue)}",
            found="an output of two products, gate and up",
            limit="one matrix product",
            instead="use schedule_skinny, which takes at most 32 rows, or compute what follows "
            "gate and up by a kernel of its own",
        )
    return chain


def _read_layer(sch: Any, rule: str, *, makes_rows: bool = False) -> Chain:
    """As `read_layers`, but a second layer raises `ScheduleRefused` in the name of `rule`."""
    chain = read_layers(sch, makes_rows=makes_rows)
    if chain.second is not None:
        raise refuse(
            ScheduleRefused,
            "rule",
            f"{rule}, {name_of(sch, chain.second)}",
            found="a chain of two products",
            limit="one matrix product",
            instead="use the ffn rule",
        )
    return chain


def read_products(sch: Any, rule: str) -> tuple[Chain, ...]:
    """One product or gate and up, or several of one operand, of which each has its own output.

    Each may make its rows of the operand's. Others raise `ScheduleRefused`, in the name of `rule`
    where they are a chain.
    """
    outputs = list(sch.get_output_blocks("root"))
    if len(outputs) == 1:
        return (_read_layer(sch, rule, makes_rows=True),)
    chains = tuple(_alone(sch, each) for each in outputs)
    first, *others = (_rows_of(sch, each) for each in chains)
    for chain, left in zip(chains[1:], others, strict=True):
        if not left.same_as(first):
            found = f"products of '{first.name}' and of '{left.name}'"
            raise _refuse(sch, chain.first[0], found, "products of one operand")
    return chains


def _rows_of(sch: Any, chain: Chain) -> Any:
    """The matrix whose rows products multiply, or make what they multiply of."""
    reads = [each.source for each in sch.get((*chain.rows, *chain.first)[0]).reads]
    return next(each for each in reads if len(each.ty.shape) == _MATRIX)


def _alone(sch: Any, epilogue: Any) -> Chain:
    """The product that one of several outputs is made of, which reads nothing that is computed."""
    products = _producers(sch, epilogue)
    if len(products) != 1 or combiner(sch, products[0]) is None or reduces(sch, epilogue):
        found = "an output that is not an elementwise function of one product"
        raise _refuse(sch, epilogue, found, "products of one operand, each with its own output")
    if before := _producers(sch, products[0]):
        found = f"a product of what {name_of(sch, before[0])} makes"
        raise _refuse(sch, products[0], found, "products of an input")
    return _checked(sch, _chain(sch, [_layer(sch, products, epilogue)]), True)


def read_last_product(sch: Any) -> Chain:
    """Find the product that the output is made of, whatever other blocks make its left operand.

    An output that is no elementwise function of one product raises `ScheduleRefused`.
    """
    given = list(function(sch).params)
    # Blocks that stand in one of the root count too, and store what another one reads.
    outputs = [
        each
        for each in sch.get_output_blocks("root")
        if any(region.source.same_as(p) for region in sch.get(each).writes for p in given)
    ]
    epilogue = _only(sch, outputs)
    products = [each for each in _producers(sch, epilogue) if reduces(sch, each)]
    if len(products) != 1:
        raise _refuse(sch, epilogue, f"an output of {len(products)} products")
    return _chain(sch, [_layer(sch, products, epilogue)])


def _only(sch: Any, outputs: list[Any]) -> Any:
    """The only one of some output blocks; others are refused, and none too."""
    if len(outputs) != 1:
        block = outputs[0] if outputs else sch.get_sblock("root")
        raise _refuse(sch, block, f"{len(outputs)} outputs")
    return outputs[0]


def _producers(sch: Any, block: Any) -> list[Any]:
    """Blocks that compute what a block reads, without what they need of rows of the input.

    These are views of inputs, which compute nothing, and what stands in `Chain.rows`.
    """
    left_out = {name_of(sch, each) for each in _of_inputs(sch, block)}
    every = (each for each in sch.get_producers(block) if not is_view(sch, each))
    return [each for each in every if name_of(sch, each) not in left_out]


def _further(block: Any, sums: Sequence[Any], params: Sequence[Any]) -> tuple[Further, ...]:
    """What an elementwise block reads except sums: inputs in their order, then what is computed."""
    place = {each: number for number, each in enumerate(params)}
    reads = {each.source: each for each in block.reads if each.source not in sums}
    found = []
    for buffer in sorted(reads, key=lambda each: place.get(each, len(place))):
        followed = [var for each in reads[buffer].region for var in ir.variables(each.min)]
        parts = tuple(
            part
            for part, own in zip(("row", "column"), block.iter_vars, strict=False)
            if any(own.var.same_as(each) for each in followed)
        )
        found.append(Further(parts, ir.item_bytes(buffer.ty.dtype), ir.element_count(buffer)))
    return tuple(found)


def _extents(sch: Any, block: Any) -> tuple[int, int, int]:
    pairs = bindings(sch, block)
    spatial = [int(var.dom.extent) for var, _ in pairs if not is_reduction(var)]
    reduced = [int(var.dom.extent) for var, _ in pairs if is_reduction(var)]
    if (len(spatial), len(reduced)) != (2, 1):
        raise _refuse(sch, block, f"a product over {len(spatial)} + {len(reduced)} loops")
    if len(sch.get(block).reads) < 2:
        names = ", ".join(f"'{each.source.name}'" for each in sch.get(block).reads)
        raise _refuse(sch, block, f"a reduction of one tensor, {names or 'none'}")
    return spatial[0], spatial[1], reduced[0]


_MATRIX = 2
#: What rules of one product or two take, and what is read at all.
_PAIR = "one matrix product, or two with one elementwise block between them"
_LAYERS = "matrix products behind one another, each with one elementwise block behind it"


def _refuse(sch: Any, block: Any, found: str, limit: str = _LAYERS) -> Exception:
    name = function(sch).attrs.get("global_symbol", "main") if function(sch).attrs else "main"
    return refuse(
        ScheduleRefused,
        "rule",
        f"function '{name}', {name_of(sch, block)}",
        found=found,
        limit=limit,
        instead="outline such a chain first (crossfuse.relax.outline), or write the schedule with "
        "the primitives",
    )
