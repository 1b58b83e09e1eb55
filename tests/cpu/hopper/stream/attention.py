"""Attention as a stream of tiles, written by hand: the form that the lowering of streams reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from tvm.script import tirx as T

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Attention:
    """An attention with its tiles."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    rows: int = 256
    keys: int = 256
    depth: int = 64
    tile: tuple[int, int] = (128, 64)
    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    alibi: bool = False
    stages: int = 0
    dtype: str = "bfloat16"

    @property
    def offset(self) -> int:
        """The last key that row 0 sees, if it is causal."""
        return self.keys - self.rows

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.depth)

    def element(self, slopes: Any) -> Callable[[Any, Any, Any, Any], Any]:
        """What is made of a score, times log2(e)."""

        def value(score: Any, head: Any, row: Any, key: Any) -> Any:
            x = score * T.float32(self.scale * LOG2E)
            if self.softcap:
                cap = self.softcap
                x = T.tanh(score * T.float32(self.scale / cap)) * T.float32(cap * LOG2E)
            if self.alibi:
                x = x + slopes[head] * T.Cast("float32", key - row) * T.float32(LOG2E)
            seen = self.seen(row, key)
            return x if seen is None else T.if_then_else(seen, x, T.float32(-math.inf))

        return value

    def seen(self, row: Any, key: Any) -> Any:
        """Whether a row sees a key; None if all do."""
        conditions = [key < self.keys] if self.keys % self.tile[1] else []
        if self.causal:
            conditions.append(key <= row + self.offset)
        if self.window:
            conditions.append(key > row + (self.offset - self.window))
        if not conditions:
            return None
        found = conditions[0]
        for each in conditions[1:]:
            found = T.And(found, each)
        return found

    def bounds(self, q: Any) -> tuple[Any, Any]:
        """First tile of keys that a tile of rows looks at, and the one behind the last."""
        rows, keys = self.tile
        first, last = T.int32(0), T.int32(-(-self.keys // keys))
        if self.causal:
            seen = T.min(self.keys, q * rows + (rows + self.offset))
            last = T.max(1, (seen + (keys - 1)) // keys)
        if self.window:
            first = T.max(0, q * rows + (self.offset - self.window + 1)) // keys
        return first, last


def attention(case: Attention) -> Any:
    """The scheduled function: a CTA for each tile of rows of a head, tiles of keys one by one."""
    B, H, HK, M, N, D = (
        *(case.batch, case.heads, case.kv_heads),
        *(case.rows, case.keys, case.depth),
    )
    BM, BN = case.tile
    QT, MP, NP = -(-M // BM), -(-M // BM) * BM, -(-N // BN) * BN
    group, dtype, stages = H // HK, case.dtype, {"crossfuse.stream": case.stages}
    bounds = case.bounds

    @T.prim_func(s_tir=True)
    def func(
        Q: T.Buffer((B, H, M, D), dtype),
        K: T.Buffer((B, HK, N, D), dtype),
        V: T.Buffer((B, HK, N, D), dtype),
        slopes: T.Buffer((H,), "float32"),
        out: T.Buffer((B, H, M, D), dtype),
    ):
        Q_s = T.sblock_alloc_buffer((B, H, MP, D), dtype, scope="shared.dyn")
        K_s = T.sblock_alloc_buffer((B, HK, NP, D), dtype, scope="shared.dyn")
        V_s = T.sblock_alloc_buffer((B, HK, NP, D), dtype, scope="shared.dyn")
        S = T.sblock_alloc_buffer((MP, NP), "float32", scope="local")
        P = T.sblock_alloc_buffer((MP, NP), "float32", scope="local")
        P16 = T.sblock_alloc_buffer((MP, NP), dtype, scope="local")
        sums = T.sblock_alloc_buffer((MP, D), "float32", scope="local")
        m = T.sblock_alloc_buffer((MP,), "float32", scope="local")
        s = T.sblock_alloc_buffer((MP,), "float32", scope="local")
        m_old = T.sblock_alloc_buffer((MP,), "float32", scope="local")
        m_safe = T.sblock_alloc_buffer((MP,), "float32", scope="local")
        c = T.sblock_alloc_buffer((MP,), "float32", scope="local")
        for bh in T.thread_binding(B * H, thread="blockIdx.y"):
            for q in T.thread_binding(QT, thread="blockIdx.x"):
                for i, d in T.grid(BM, D):
                    with T.sblock("load_q"):
                        vb, vh = T.axis.spatial(B, bh // H), T.axis.spatial(H, bh % H)
                        T.where(q * BM + i < M)
                        vr, vd = T.axis.spatial(M, q * BM + i), T.axis.spatial(D, d)
                        Q_s[vb, vh, vr, vd] = Q[vb, vh, vr, vd]
                for i in range(BM):
                    with T.sblock("m_init"):
                        vr = T.axis.spatial(MP, q * BM + i)
                        m[vr] = T.float32(-math.inf)
                for i in range(BM):
                    with T.sblock("s_init"):
                        vr = T.axis.spatial(MP, q * BM + i)
                        s[vr] = T.float32(0)
                for i, d in T.grid(BM, D):
                    with T.sblock("o_init"):
                        vr, vd = T.axis.spatial(MP, q * BM + i), T.axis.spatial(D, d)
                        sums[vr, vd] = T.float32(0)
                for t in T.serial(bounds(q)[0], bounds(q)[1], annotations=stages):
                    for j, d in T.grid(BN, D):
                        with T.sblock("load_k"):
                            vb, vh = T.axis.spatial(B, bh // H), T.axis.spatial(H, bh % H)
                            T.where(t * BN + j < N)
                            vk, vd = T.axis.spatial(N, t * BN + j), T.axis.spatial(D, d)
                            K_s[vb, vh // group, vk, vd] = K[vb, vh // group, vk, vd]
                    for i, j, d in T.grid(BM, BN, D):
                        with T.sblock("scores"):
                            vb, vh = T.axis.spatial(B, bh // H), T.axis.spatial(H, bh % H)
                            vr, vk = (
                                T.axis.spatial(MP, q * BM + i),
                                T.axis.spatial(NP, t * BN + j),
                            )
                            vd = T.axis.reduce(D, d)
                            with T.init():
                                S[vr, vk] = T.float32(0)
                            S[vr, vk] += T.Cast("float32", Q_s[vb, vh, vr, vd]) * T.Cast(
                                "float32", K_s[vb, vh // group, vk, vd]
                            )
                    for i in range(BM):
                        with T.sblock("m_old"):
                            vr = T.axis.spatial(MP, q * BM + i)
                            m_old[vr] = m[vr]
                    for i, j in T.grid(BM, BN):
                        with T.sblock("m"):
                            vh = T.axis.spatial(H, bh % H)
                            vr = T.axis.spatial(MP, q * BM + i)
                            vk = T.axis.reduce(NP, t * BN + j)
                            m[vr] = T.max(m[vr], case.element(slopes)(S[vr, vk], vh, vr, vk))
                    for i in range(BM):
                        with T.sblock("m_safe"):
                            vr = T.axis.spatial(MP, q * BM + i)
                            m_safe[vr] = T.Select(
                                m[vr] == T.float32(-math.inf), T.float32(0), m[vr]
                            )
                    for i in range(BM):
                        with T.sblock("c"):
                            vr = T.axis.spatial(MP, q * BM + i)
                            c[vr] = T.exp2(m_old[vr] - m_safe[vr])
                    for i, j in T.grid(BM, BN):
                        with T.sblock("p"):
                            vh = T.axis.spatial(H, bh % H)
                            vr, vk = (
                                T.axis.spatial(MP, q * BM + i),
                                T.axis.spatial(NP, t * BN + j),
                            )
                            P[vr, vk] = T.exp2(
                                case.element(slopes)(S[vr, vk], vh, vr, vk) - m_safe[vr]
                            )
                    for i in range(BM):
                        with T.sblock("s_carried"):
                            vr = T.axis.spatial(MP, q * BM + i)
                            s[vr] = s[vr] * c[vr]
                    for i, j in T.grid(BM, BN):
                        with T.sblock("s"):
                            vr = T.axis.spatial(MP, q * BM + i)
                            vk = T.axis.reduce(NP, t * BN + j)
                            s[vr] = s[vr] + P[vr, vk]
                    for i, j in T.grid(BM, BN):
                        with T.sblock("p_16"):
                            vr, vk = (
                                T.axis.spatial(MP, q * BM + i),
                                T.axis.spatial(NP, t * BN + j),
                            )
                            P16[vr, vk] = T.Cast(dtype, P[vr, vk])
                    for j, d in T.grid(BN, D):
                        with T.sblock("load_v"):
                            vb, vh = T.axis.spatial(B, bh // H), T.axis.spatial(H, bh % H)
                            vk, vd = T.axis.spatial(NP, t * BN + j), T.axis.spatial(D, d)
                            V_s[vb, vh // group, vk, vd] = T.if_then_else(
                                vk < N, V[vb, vh // group, vk, vd], T.Cast(dtype, 0)
                            )
                    for i, d in T.grid(BM, D):
                        with T.sblock("o_carried"):
                            vr, vd = T.axis.spatial(MP, q * BM + i), T.axis.spatial(D, d)
                            sums[vr, vd] = sums[vr, vd] * c[vr]
                    for i, d, j in T.grid(BM, D, BN):
                        with T.sblock("o"):
                            vb, vh = T.axis.spatial(B, bh // H), T.axis.spatial(H, bh % H)
                            vr, vd = T.axis.spatial(MP, q * BM + i), T.axis.spatial(D, d)
                            vk = T.axis.reduce(NP, t * BN + j)
                            sums[vr, vd] = sums[vr, vd] + T.Cast("float32", P16[vr, vk]) * T.Cast(
                                "float32", V_s[vb, vh // group, vk, vd]
                            )
                for i, d in T.grid(BM, D):
                    with T.sblock("store"):
                        vb, vh = T.axis.spatial(B, bh // H), T.axis.spatial(H, bh % H)
                        T.where(q * BM + i < M)
                        vr, vd = T.axis.spatial(M, q * BM + i), T.axis.spatial(D, d)
                        out[vb, vh, vr, vd] = T.Cast(
                            dtype,
                            sums[vr, vd]
                            * T.Select(s[vr] > T.float32(0), T.float32(1) / s[vr], T.float32(0)),
                        )

    return func


def inputs(case: Attention, seed: int = 0, size: float = 1.0) -> dict[str, np.ndarray]:
    """Random arguments; queries of some size."""
    random = np.random.default_rng(seed)
    kind = getattr(ml_dtypes, case.dtype, None) or np.dtype(case.dtype)

    def normal(heads: int, rows: int, factor: float = 1.0) -> np.ndarray:
        shape = (case.batch, heads, rows, case.depth)
        return (factor * random.standard_normal(shape)).astype(kind)

    return {
        "Q": normal(case.heads, case.rows, size),
        "K": normal(case.kv_heads, case.keys),
        "V": normal(case.kv_heads, case.keys),
        "slopes": (2.0 ** -np.arange(1, case.heads + 1)).astype(np.float32),
    }


def reference(case: Attention, given: dict[str, np.ndarray], unfused: bool = False) -> np.ndarray:
    """Exact attention; `unfused`: rounded as kernels for each operator would."""
    kind = given["Q"].dtype
    number = np.float32 if unfused else np.float64
    group = case.heads // case.kv_heads
    q, k, v = (given[each].astype(number) for each in ("Q", "K", "V"))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    x = (q @ k.swapaxes(-1, -2)) * number(case.scale)
    if case.softcap:
        x = np.tanh(x / case.softcap) * case.softcap
    row, key = np.arange(case.rows)[:, None], np.arange(case.keys)[None]
    if case.alibi:
        x = x + given["slopes"].astype(number)[:, None, None] * (key - row)
    seen = np.ones((case.rows, case.keys), bool)
    if case.causal:
        seen &= key <= row + case.offset
    if case.window:
        seen &= key > row + case.offset - case.window
    x = np.where(seen, x, -np.inf)
    top = x.max(-1, keepdims=True)
    p = np.exp(x - np.where(np.isinf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    p = np.where(total > 0, p / np.where(total > 0, total, 1), 0)
    if unfused:
        p = p.astype(kind).astype(number)
        return (p @ v).astype(kind).astype(np.float64)
    return np.asarray(p @ v)
