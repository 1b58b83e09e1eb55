"""Attention with masks and scores of all kinds: plain functions, and what numpy makes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from tvm import te, tirx


@dataclass(frozen=True)
class Masked:
    """An attention of one batch.

    Attributes
    ----------
    window : int
        Keys that a query sees, its own the last; 0 for any number.
    block : int
        Keys in blocks that do not see each other; 0 for none.
    cap : float
        Bound of scores, by a hyperbolic tangent; 0 for none.
    alibi : bool
        A slope for each head, times the distance.
    lengths : bool
        Keys of each head end at a length that is read.
    documents : bool
        Queries see keys of their own document only.
    table : bool
        A tensor says which query sees which key.
    padding : bool
        A tensor says which keys are seen.
    apart : bool
        It says so for each head.
    shift : int
        How many keys before is what it says of one; the first keys are not seen.
    bias : bool
        A tensor is added to the scores.
    hidden : float
        Added to scores of keys that are not seen; with a number, a query that sees none weighs
        them by it.
    """

    heads: int = 2
    share: int = 1
    rows: int = 9
    keys: int = 11
    depth: int = 4
    causal: bool = False
    window: int = 0
    block: int = 0
    cap: float = 0.0
    alibi: bool = False
    lengths: bool = False
    documents: bool = False
    table: bool = False
    padding: bool = False
    apart: bool = False
    shift: int = 0
    bias: bool = False
    hidden: float = -math.inf
    dtype: str = "bfloat16"

    @property
    def ahead(self) -> int:
        """The last key that query 0 sees, if it is causal."""
        return self.keys - self.rows

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.depth)

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Inputs, in order."""
        kv = (self.heads // self.share, self.keys, self.depth)
        found = {"q": ((self.heads, self.rows, self.depth), self.dtype)}
        found |= {"k": (kv, self.dtype), "v": (kv, self.dtype)}
        filled = (self.heads, self.keys) if self.apart else (self.keys,)
        further = {
            "slopes": (self.alibi, ((self.heads,), "float32")),
            "length": (self.lengths, ((self.heads,), "int32")),
            "row_document": (self.documents, ((self.rows,), "int32")),
            "key_document": (self.documents, ((self.keys,), "int32")),
            "seen": (self.table, ((self.rows, self.keys), "bool")),
            "filled": (self.padding, (filled, "bool")),
            "bias": (self.bias, ((self.rows, self.keys), self.dtype)),
        }
        return found | {name: each for name, (used, each) in further.items() if used}


def function(case: Masked) -> Any:
    """The plain function."""
    given = {name: te.placeholder(*kind, name) for name, kind in case.shapes.items()}
    q, k, v = (given[name] for name in "qkv")
    shape = (case.heads, case.rows)
    d = te.reduce_axis((0, case.depth), "d")
    j, each, o = (te.reduce_axis((0, case.keys), name) for name in ("j", "each", "o"))

    def wide(value: Any) -> Any:
        return value.astype("float32")

    def score(h: Any, i: Any, key: Any) -> Any:
        x = scores[h, i, key] * tirx.const(case.scale, "float32")
        if case.cap:
            x = tirx.tanh(x / tirx.const(case.cap, "float32")) * tirx.const(case.cap, "float32")
        if case.alibi:
            x = x + given["slopes"][h] * wide(key - i)
        if case.bias:
            x = x + wide(given["bias"][i, key])
        conditions = _conditions(case, given, h, i, key)
        if not conditions:
            return x
        hidden = tirx.const(case.hidden, "float32")
        added = x + hidden if math.isfinite(case.hidden) else hidden
        return tirx.Select(tirx.all(*conditions), x, added)

    scores = te.compute(
        (*shape, case.keys),
        lambda h, i, key: te.sum(wide(q[h, i, d]) * wide(k[h // case.share, key, d]), axis=d),
        "scores",
    )
    x = te.compute(scores.shape, score, "x")
    m = te.compute(shape, lambda h, i: te.max(x[h, i, j], axis=j), "m")
    p = te.compute(scores.shape, lambda h, i, key: tirx.exp(x[h, i, key] - m[h, i]), "p")
    s = te.compute(shape, lambda h, i: te.sum(p[h, i, each], axis=each), "s")
    rounded = te.compute(p.shape, lambda *at: p(*at).astype(case.dtype), "rounded")
    total = te.compute(
        q.shape,
        lambda h, i, c: te.sum(wide(rounded[h, i, o]) * wide(v[h // case.share, o, c]), axis=o),
        "o",
    )
    out = te.compute(q.shape, lambda h, i, c: (total[h, i, c] / s[h, i]).astype(case.dtype), "out")
    return te.create_prim_func([*given.values(), out])


def _conditions(case: Masked, given: Any, h: Any, i: Any, key: Any) -> list[Any]:
    """What must hold for a key to be seen; for tensors of TVM and arrays alike."""
    found = []
    if case.causal:
        found.append(key <= i + case.ahead)
    if case.window:
        found.append(key > i + (case.ahead - case.window))
    if case.block:
        found.append(_same_block(key, i, case.block))
    if case.lengths:
        found.append(key < given["length"][h])
    if case.documents:
        found.append(_equal(given["row_document"][i], given["key_document"][key]))
    if case.table:
        found.append(given["seen"][i, key])
    if case.padding:
        filled = given["filled"]
        found.append(filled[h, key] if case.apart else _filled(filled, key, case.shift))
    return found


def _filled(filled: Any, key: Any, shift: int) -> Any:
    if not shift:
        return filled[key]
    if isinstance(key, np.ndarray):
        return (key >= shift) & filled[np.maximum(key - shift, 0)]
    return tirx.if_then_else(key >= shift, filled[key - shift], tirx.const(False, "bool"))


def _same_block(key: Any, i: Any, size: int) -> Any:
    return _equal(key // size, i // size)


def _equal(one: Any, other: Any) -> Any:
    return one == other if isinstance(one, np.ndarray) else tirx.EQ(one, other)


def inputs(case: Masked, seed: int = 0, size: float = 1.0) -> dict[str, np.ndarray]:
    """Random arguments, the queries of some size; all keys of the first head are cut off."""
    random = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    for name, (shape, dtype) in case.shapes.items():
        if dtype == "int32":
            found[name] = np.sort(random.integers(0, 3, shape)).astype(np.int32)
        elif dtype == "bool":
            found[name] = random.random(shape) < 0.5
        else:
            kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
            factor = size if name == "q" else 1.0
            found[name] = (factor * random.standard_normal(shape)).astype(kind)
    if case.lengths:
        found["length"] = random.integers(1, case.keys + 1, case.heads).astype(np.int32)
        found["length"][0] = 0
    if case.table:
        found["seen"][0] = False
    return found


def reference(case: Masked, given: dict[str, np.ndarray], number: Any = np.float64) -> np.ndarray:
    """Attention; a query that sees no key gives 0. In float32 rounded as separate kernels would."""
    kind = given["q"].dtype
    q, k, v = (given[each].astype(number) for each in "qkv")
    k, v = (np.repeat(each, case.share, 0) for each in (k, v))
    x = (q @ k.swapaxes(-1, -2)) * number(case.scale)
    if case.cap:
        x = np.tanh(x / number(case.cap)) * number(case.cap)
    h, i, key = np.ogrid[: case.heads, : case.rows, : case.keys]
    if case.alibi:
        x = x + given["slopes"].astype(number)[h] * (key - i)
    if case.bias:
        x = x + given["bias"].astype(number)
    seen = np.ones(x.shape, bool)
    for each in _conditions(case, given, h, i, key):
        seen &= each
    x = np.where(seen, x, x + number(case.hidden))
    top = x.max(-1, keepdims=True)
    p = np.exp(x - np.where(np.isinf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    if number is np.float32:
        p = p.astype(kind).astype(number)
    out = (p @ v) / np.where(total > 0, total, 1)
    return out.astype(kind).astype(np.float64) if number is np.float32 else out
