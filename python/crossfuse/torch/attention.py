"""Attention of few queries that is one operator of torch, as a function whose loops we know.

A decoder that makes one token asks for one row of a head over all keys of its cache. Torch has a
fused kernel for that, which gives a head of queries to a CTA or two, and reads keys once for each
head of queries that shares them. So the operator is written as a function, and what it becomes is
decided like any other cascade.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx
from tvm import te, tirx, topi

from crossfuse.cascade.rewrite.work import Pass

#: Operators of torch that compute attention, by what they are named after; the first of their
#: results is what attention makes.
_OPERATORS = frozenset(
    f"_scaled_dot_product_{name}.default"
    for name in (
        *("efficient_attention", "flash_attention", "flash_attention_for_cpu"),
        *("cudnn_attention", "fused_attention_overrideable"),
    )
)
#: Most rows of a head of queries: beyond these torch's kernel multiplies as fast as ours.
MOST_QUERIES = 16
_RANK = 4


@dataclass(frozen=True)
class Attention:
    """The operands of an operator of torch, and what else it was told.

    Queries are [batch, heads, rows, depth], keys and values have one head for one head of queries
    or for several.
    """

    #: The operator; a node takes the first of its results.
    source: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    #: Flags of what is seen, or what is added to scores; None without one.
    mask: fx.Node | None
    #: What scores are multiplied by; None is one over the root of the depth.
    scale: float | None
    #: Whether row i sees the keys up to i alone.
    causal: bool

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """Tensors that it reads."""
        given = (self.query, self.key, self.value)
        return given if self.mask is None else (*given, self.mask)

    def emit(self, importer: Any) -> Any:
        """Emit a call of the function that attention is; the importer has its operands."""
        given = [importer.env[each] for each in self.reads]
        return importer.block_builder.emit_te(
            _attended, given, self.scale, self.causal, primfunc_name_hint="attention"
        )


def attention_of(node: fx.Node) -> Attention | None:
    """Attention that a node takes out of an operator's results; None where it is something else.

    Only if nothing reads the other results, nothing is dropped, shapes are numbers, and queries are
    few.
    """
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or getattr(source.target, "__name__", "") not in _OPERATORS:
        return None
    told = _arguments(source)
    mask = told.get("attn_mask", told.get("attn_bias"))
    query, key, value = (told[name] for name in ("query", "key", "value"))
    found = Attention(source, query, key, value, mask, told["scale"], told["is_causal"])
    alone = list(source.users) == [node] and not told["dropout_p"]
    return found if alone and _is_taken(found) else None


def _is_taken(found: Attention) -> bool:
    shapes = [tuple(each.meta["val"].shape) for each in found.reads]
    if not all(isinstance(extent, int) for shape in shapes for extent in shape):
        return False
    query, key, value = shapes[:3]
    if any(len(each) != _RANK for each in shapes) or query[2] > MOST_QUERIES:
        return False
    return key[:3] == value[:3] and query[0] == key[0] and query[1] % key[1] == 0


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name, those that were left out too."""
    schema: Any = node.target
    known = schema._schema.arguments
    told = {each.name: each.default_value for each in known if each.has_default_value()}
    told |= {each.name: value for each, value in zip(known, node.args, strict=False)}
    return told | dict(node.kwargs)


# What torch launches for it, which a kernel of ours has to beat.


def launches(output: fx.Node, inside: Collection[fx.Node]) -> tuple[Pass, ...]:
    """Kernels of torch for the nodes `inside` a group up to its output; none without the operator.

    The operator is one of them, whatever number of passes its formula takes. In front of it stands
    one for each of queries, keys and values that is made inside, such as keys that are repeated for
    heads that share them, and what follows is one more. A mask is left out: all layers read one.
    """
    found = {node: one for node in inside if (one := attention_of(node)) is not None}
    kernels: list[Pass] = []
    for node, one in found.items():
        operands = map(_maker, (one.query, one.key, one.value))
        made = [each for each in operands if each in inside]
        kernels += [
            Pass(each.name, sum(map(_bytes, _given(each, inside))), _bytes(each)) for each in made
        ]
        kernels += _passes_of(node, one)
        if _maker(output) is not node:
            kernels.append(Pass(output.name, _bytes(node), _bytes(output)))
    return tuple(kernels)


def _passes_of(node: fx.Node, found: Attention) -> list[Pass]:
    """The operator, which takes a kernel's time longer than its bytes: as if a second one merged.

    On an H200 7.0, 10.3, 11.9, 15.0 and 39.6 us of 1, 4, 8, 16 and 64 sequences of 1024 keys and 8
    heads of 64 (`benchmarks/results/attention-one-token-h200.txt`); one pass would be 4.1 to 38.6.
    """
    batch, heads, rows, depth = found.query.meta["val"].shape
    length, columns = found.value.meta["val"].shape[2:]
    flops = 2 * batch * heads * rows * length * (depth + columns)
    name, made = found.source.name, _bytes(node)
    first = Pass(name, sum(map(_bytes, found.reads)), made, flops)
    return [first, Pass(f"{name} (end)", made, made)]


def _maker(node: fx.Node) -> fx.Node:
    """The node that made the elements which a node sees, through views."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or len(node.all_input_nodes) != 1:
        return False
    return node.target.__name__ == "_unsafe_view.default" or any(
        each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
    )


def _given(node: fx.Node, inside: Collection[fx.Node]) -> Iterator[fx.Node]:
    """What nodes of a group that a node is made of read of others."""
    pending, seen = [node], set[fx.Node]()
    while pending:
        for each in pending.pop().all_input_nodes:
            if each not in seen:
                seen.add(each)
                if each in inside:
                    pending.append(each)
                else:
                    yield each


def _bytes(node: fx.Node) -> int:
    """Bytes of the elements that a node makes; those that an expanded axis repeats are one."""
    value = node.meta["val"]
    extents = zip(value.shape, value.stride(), strict=True)
    return value.element_size() * prod(int(size) for size, stride in extents if stride)


# The operator as a function.


def is_attention(value: Any) -> bool:
    """Whether an expression of a translated graph is what `Attention.emit` emits."""
    op = getattr(value, "op", None)
    return getattr(op, "name", "") == "relax.call_tir"


def _attended(given: list[te.Tensor], scale: float | None, causal: bool) -> te.Tensor:
    """Attention that adds in float32, and rounds weights and results to the type of queries."""
    q, k, v, *masks = given
    dtype, wide = str(q.dtype), _wide(str(q.dtype))
    batch, heads, rows, depth = q.shape
    share = int(heads) // int(k.shape[1])
    scores = _product(
        (batch, heads, rows, k.shape[2]),
        depth,
        lambda b, h, i, j, at: q[b, h, i, at].astype(wide) * k[b, h // share, j, at].astype(wide),
    )
    factor = int(depth) ** -0.5 if scale is None else float(scale)
    scaled = te.compute(
        scores.shape,
        lambda b, h, i, j: _masked(
            scores[b, h, i, j] * tirx.const(factor, wide), masks, causal, (b, h, i, j)
        ),
        name="scaled",
    )
    chances = topi.cast(topi.nn.softmax(scaled, axis=-1), dtype)
    made = _product(
        (batch, heads, rows, v.shape[3]),
        k.shape[2],
        lambda b, h, i, c, at: (
            chances[b, h, i, at].astype(wide) * v[b, h // share, at, c].astype(wide)
        ),
    )
    return topi.cast(made, dtype)


def _masked(score: Any, masks: list[te.Tensor], causal: bool, place: tuple[Any, ...]) -> Any:
    """A score under a mask, which is broadcast, and under the diagonal."""
    nothing = tirx.const(float("-inf"), str(score.ty))
    for each in masks:
        extents = zip(place, each.shape, strict=True)
        value = each(*(0 if int(extent) == 1 else at for at, extent in extents))
        flags = str(each.dtype) == "bool"
        score = tirx.Select(value, score, nothing) if flags else score + value.astype(str(score.ty))
    return tirx.Select(place[3] <= place[2], score, nothing) if causal else score


def _product(shape: Any, depth: Any, term: Any) -> te.Tensor:
    at = te.reduce_axis((0, depth), name="k")
    return te.compute(shape, lambda *place: te.sum(term(*place, at), axis=at), name="product")


def _wide(dtype: str) -> str:
    return "float32" if dtype in ("float16", "bfloat16") else dtype
