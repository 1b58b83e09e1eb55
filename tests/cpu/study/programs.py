"""Random functions of chains, written so that nothing but their accesses says what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from tvm import te, tirx

from cpu.planner.layouts import Layout, random_layout
from crossfuse import _tvm as ir
from crossfuse.planner.chain.build import Further, Layer, Operand, assemble
from crossfuse.planner.chain.spec import Chain
from crossfuse.workload.expression import CYCLES

#: A value of a matrix at a row and a column.
Value = Callable[[Any, Any], Any]
SIZES = {"float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4}
NARROW = ("float8_e4m3fn", "float16", "bfloat16")


@dataclass
class Writer:
    """Writes one function."""

    rng: np.random.Generator
    inputs: list[te.Tensor] = field(default_factory=list)
    #: What each layer reads besides, with the input.
    besides: list[list[tuple[te.Tensor, Further]]] = field(default_factory=list)

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def factors(self) -> tuple[int, ...]:
        return tuple(int(each) for each in self.rng.choice([1, 2, 3], self.rng.integers(1, 4)))

    def name(self) -> str:
        return "".join(self.rng.choice(list("abcxyz"), 6))

    def placeholder(self, shape: tuple[int, ...], dtype: str) -> te.Tensor:
        self.inputs.append(te.placeholder(shape, dtype, self.name()))
        return self.inputs[-1]

    def stored(self, axes: list[tuple[int, ...]], dtype: str) -> tuple[te.Tensor, Layout]:
        layout = random_layout(self.rng, axes)
        return self.placeholder(layout.shape, dtype), layout

    def block(self, axes: list[tuple[int, ...]], value: Value) -> Value:
        """Store a matrix in any layout, and read it."""
        layout = random_layout(self.rng, axes)
        tensor = te.compute(
            layout.shape,
            lambda *at: value(layout.position(at, 0), layout.position(at, 1)),
            name=self.name(),
        )
        return lambda row, column: tensor(*layout.indices([row, column]))


@dataclass
class Case:
    """A function and the chain that it was made from."""

    func: Any
    chain: Chain


def random_program(rng: np.random.Generator) -> Case:
    """Write a chain of one to four products."""
    writer = Writer(rng)
    batch = writer.factors() if writer.chance(0.4) else ()
    rows, depth = writer.factors(), writer.factors()
    count = int(rng.integers(1, 5))
    # A batch of one is none.
    batched = [prod(batch) > 1 and writer.chance(0.5) for _ in range(count)]
    dtype = str(rng.choice(NARROW))
    tensor, layout = writer.stored([(*batch, *rows), depth], dtype)
    value: Value = lambda row, column: tensor(*layout.indices([row, column]))  # noqa: E731
    layers: list[dict[str, Any]] = []
    for index in range(count):
        width = writer.factors()
        axes = [(*batch, *rows), width]
        weights, value = _products(
            writer, value, axes, depth, batch if batched[index] else (), rows
        )
        writer.besides.append([])
        last = index == count - 1
        value, kind = _between(writer, value, axes, any(batched), len(batch), last)
        layers.append({"width": prod(width), "weights": weights, "item": SIZES[kind]})
        depth = width
    out = te.compute(
        (final := random_layout(rng, axes, permuted=count > 1)).shape,
        lambda *at: value(final.position(at, 0), final.position(at, 1)),
        name=writer.name(),
    )
    order = [0, *(1 + rng.permutation(len(writer.inputs) - 1))]
    inputs = [writer.inputs[each] for each in order]
    func = shuffled(rng, te.create_prim_func([*inputs, out]))
    return Case(func, _expected(writer, inputs, layers, rows, batch, batched, dtype))


def _products(
    writer: Writer,
    left: Value,
    axes: list[tuple[int, ...]],
    depth: tuple[int, ...],
    batch: tuple[int, ...],
    rows: tuple[int, ...],
) -> tuple[list[tuple[te.Tensor, Operand]], Value]:
    """One product or two of a left operand, and what they make together."""
    made, weights = [], []
    for _ in range(2 if writer.chance(0.3) else 1):
        kind = str(writer.rng.choice(NARROW))
        stored = [axes[1], depth, *([batch] if batch else [])]
        tensor, layout = writer.stored(stored, kind)
        weights.append((tensor, Operand(SIZES[kind], batched=bool(batch))))
        # A weight of its own for each matrix must see the batch as loops of its own.
        made.append(_product(writer, left, tensor, layout, axes, depth, rows if batch else ()))
    if len(made) == 1:
        return weights, made[0]
    gate, up = made
    return weights, lambda row, column: tirx.sigmoid(gate(row, column)) * up(row, column)


def _product(
    writer: Writer,
    left: Value,
    weight: te.Tensor,
    layout: Layout,
    axes: list[tuple[int, ...]],
    depth: tuple[int, ...],
    rows: tuple[int, ...],
) -> Value:
    made = random_layout(writer.rng, axes)
    pieces = random_layout(writer.rng, [depth], permuted=False)
    loops = [te.reduce_axis((0, extent), writer.name()) for extent in pieces.shape]
    swap = writer.chance(0.5)

    def element(*at: Any) -> Any:
        row, column = made.position(at, 0), made.position(at, 1)
        k = pieces.position(loops, 0)
        where = [column, k, *([row // prod(rows)] if rows else [])]
        factors = [left(row, k), weight(*layout.indices(where))]
        one, other = (each.astype("float32") for each in (reversed(factors) if swap else factors))
        return te.sum(one * other, axis=loops)

    tensor = te.compute(made.shape, element, name=writer.name())
    return lambda row, column: tensor(*made.indices([row, column]))


def _between(
    writer: Writer,
    value: Value,
    axes: list[tuple[int, ...]],
    has_batch: bool,
    batch_factors: int,
    last: bool,
) -> tuple[Value, str]:
    """Any number of element-wise blocks, and the type of what they make."""
    for _ in range(int(writer.rng.integers(0, 3))):
        value = writer.block(axes, _changed(writer, value, axes, has_batch, batch_factors))
    if not last and writer.chance(0.2):
        # Sums that nothing is done to are stored as they are.
        return value, "float32"
    kind = str(writer.rng.choice(NARROW))
    before = _changed(writer, value, axes, has_batch, batch_factors)
    stored = lambda row, column: before(row, column).astype(kind)  # noqa: E731
    return (stored if last else writer.block(axes, stored)), kind


def _changed(
    writer: Writer,
    value: Value,
    axes: list[tuple[int, ...]],
    has_batch: bool,
    batch_factors: int,
) -> Value:
    """A value with something done to it, most often with a further input."""
    kind, dtype = int(writer.rng.integers(5)), str(writer.rng.choice(["float16", "float32"]))
    if kind == 0:
        return lambda row, column: tirx.max(value(row, column), tirx.const(0, "float32"))
    followed = {1: (), 2: (1,), 3: (0,), 4: (0, 1)}[kind]
    tensor, layout = writer.stored([axes[each] for each in followed], dtype)
    parts: list[str] = []
    if 0 in followed:
        matrices = prod(axes[0][:batch_factors]) if has_batch else 1
        parts += ["batch"] * (matrices > 1) + ["row"] * (prod(axes[0]) > matrices)
    if 1 in followed and prod(axes[1]) > 1:
        parts.append("column")
    writer.besides[-1].append((tensor, Further(tuple(parts), SIZES[dtype])))

    def element(row: Any, column: Any) -> Any:
        at = layout.indices([(row, column)[each] for each in followed])
        return value(row, column) + tensor(*at).astype("float32")

    return element


def _expected(
    writer: Writer,
    inputs: list[te.Tensor],
    layers: list[dict[str, Any]],
    rows: tuple[int, ...],
    batch: tuple[int, ...],
    batched: list[bool],
    dtype: str,
) -> Chain:
    place = {each: index for index, each in enumerate(inputs)}
    made = []
    for each, besides in zip(layers, writer.besides, strict=True):
        weights = [operand for _, operand in sorted(each["weights"], key=lambda w: place[w[0]])]
        further = [found for _, found in sorted(besides, key=lambda f: place[f[0]])]
        functions = CYCLES["sigmoid"] if len(weights) > 1 else 0
        made.append(
            Layer(each["width"], tuple(weights), each["item"], tuple(further), functions=functions)
        )
    has_batch, depth = any(batched), prod(writer.inputs[0].shape) // prod((*batch, *rows))
    return assemble(
        prod(rows) if has_batch else prod((*batch, *rows)),
        int(depth),
        Operand(SIZES[dtype]),
        made,
        batch=prod(batch) if has_batch else 0,
    )


def shuffled(rng: np.random.Generator, func: Any) -> Any:
    """The blocks of a function in another order that their data allow, under other names."""
    root = func.body.block
    nests = list(root.body.seq) if isinstance(root.body, ir.SeqStmt) else [root.body]
    writes, needs = [], []
    for nest in nests:
        block = _leaf(nest).block
        writes.append({each.source for each in block.writes})
        needs.append({each.source for each in block.reads} - writes[-1])
    waiting, order = set(range(len(nests))), []
    while waiting:
        ready = [
            each
            for each in sorted(waiting)
            if not any(needs[each] & writes[other] for other in waiting - {each})
        ]
        order.append(int(rng.choice(ready)))
        waiting.remove(order[-1])
    named = [_named(nests[each], "".join(rng.choice(list("pqrs"), 5))) for each in order]
    body = named[0] if len(named) == 1 else ir.SeqStmt(named)
    whole = ir.SBlockRealize([], ir.tirx.IntImm("bool", 1), ir.block_like(root, body=body))
    return ir.with_body(func, whole)


def _leaf(nest: Any) -> Any:
    while isinstance(nest, ir.For):
        nest = nest.body
    return nest


def _named(nest: Any, name: str) -> Any:
    if isinstance(nest, ir.For):
        return ir.for_like(nest, _named(nest.body, name))
    block = ir.block_like(nest.block, name_hint=name)
    return ir.SBlockRealize(list(nest.iter_values), nest.predicate, block)
