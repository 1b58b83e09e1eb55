"""A small causal attention as a person writes it, and as a stream over tiles."""

from __future__ import annotations

from tvm.script import tirx as T


@T.prim_func(s_tir=True)
def Before(
    q: T.Buffer((4, 2), "float16"),
    k: T.Buffer((6, 2), "float16"),
    v: T.Buffer((6, 2), "float16"),
    out: T.Buffer((4, 2), "float32"),
):
    scores = T.sblock_alloc_buffer((4, 6), "float32")
    m = T.sblock_alloc_buffer((4,), "float32")
    s = T.sblock_alloc_buffer((4,), "float32")
    o = T.sblock_alloc_buffer((4, 2), "float32")
    for i, j, d in T.grid(4, 6, 2):
        with T.sblock("scores"):
            vi, vj, vd = T.axis.remap("SSR", [i, j, d])
            with T.init():
                scores[vi, vj] = T.float32(0)
            scores[vi, vj] += T.Cast("float32", q[vi, vd]) * T.Cast("float32", k[vj, vd])
    for i, j in T.grid(4, 6):
        with T.sblock("m"):
            vi, vj = T.axis.remap("SR", [i, j])
            with T.init():
                m[vi] = T.float32("-inf")
            m[vi] = T.max(
                m[vi], T.Select(vj <= vi + 2, scores[vi, vj] * T.float32(0.5), T.float32("-inf"))
            )
    for i, j in T.grid(4, 6):
        with T.sblock("s"):
            vi, vj = T.axis.remap("SR", [i, j])
            with T.init():
                s[vi] = T.float32(0)
            s[vi] += T.exp(
                T.Select(vj <= vi + 2, scores[vi, vj] * T.float32(0.5), T.float32("-inf")) - m[vi]
            )
    for i, c, j in T.grid(4, 2, 6):
        with T.sblock("o"):
            vi, vc, vj = T.axis.remap("SSR", [i, c, j])
            with T.init():
                o[vi, vc] = T.float32(0)
            o[vi, vc] += T.exp(
                T.Select(vj <= vi + 2, scores[vi, vj] * T.float32(0.5), T.float32("-inf")) - m[vi]
            ) * T.Cast("float32", v[vj, vc])
    for i, c in T.grid(4, 2):
        with T.sblock("out"):
            vi, vc = T.axis.remap("SS", [i, c])
            out[vi, vc] = o[vi, vc] / s[vi]


@T.prim_func(s_tir=True)
def After(
    q: T.Buffer((4, 2), "float16"),
    k: T.Buffer((6, 2), "float16"),
    v: T.Buffer((6, 2), "float16"),
    out: T.Buffer((4, 2), "float32"),
):
    T.func_attr({"global_symbol": "Before"})
    for column_tile_row_tile_fused in T.thread_binding(2, thread="blockIdx.x"):
        with T.sblock("tile"):
            v_column_tile = T.axis.spatial(1, 0)  # noqa: F841
            v_row_tile = T.axis.spatial(2, column_tile_row_tile_fused)
            m = T.sblock_alloc_buffer((4,), scope="local")
            s = T.sblock_alloc_buffer((4,), scope="local")
            o = T.sblock_alloc_buffer((4, 2), scope="local")
            q_shared = T.sblock_alloc_buffer((4, 2), "float16", scope="shared.dyn")
            m_old = T.sblock_alloc_buffer((4,), scope="local")
            scores = T.sblock_alloc_buffer((4, 8), scope="local")
            k_shared = T.sblock_alloc_buffer((8, 2), "float16", scope="shared.dyn")
            m_safe = T.sblock_alloc_buffer((4,), scope="local")
            factor0 = T.sblock_alloc_buffer((4,), scope="local")
            tile0 = T.sblock_alloc_buffer((4, 8), scope="local")
            v_shared = T.sblock_alloc_buffer((8, 2), "float16", scope="shared.dyn")
            tile0_rounded = T.sblock_alloc_buffer((4, 8), "float16", scope="local")
            s_safe = T.sblock_alloc_buffer((4,), scope="local")
            out0_scale0 = T.sblock_alloc_buffer((4,), scope="local")
            for i, d in T.grid(2, 2):
                with T.sblock("q_shared"):
                    v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                    v_d = T.axis.spatial(2, d)
                    q_shared[v_i, v_d] = q[v_i, v_d]
            for i in range(2):
                with T.sblock("m_init"):
                    v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                    m[v_i] = T.float32("-inf")
            for i in range(2):
                with T.sblock("s_init"):
                    v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                    s[v_i] = T.float32(0.0)
            for i, c in T.grid(2, 2):
                with T.sblock("o_init"):
                    v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                    v_c = T.axis.spatial(2, c)
                    o[v_i, v_c] = T.float32(0.0)
            for t in T.serial((v_row_tile * 2 + 3) // 4 + 1, annotations={"crossfuse.stream": 0}):
                for i in range(2):
                    with T.sblock("m_keep"):
                        v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                        m_old[v_i] = m[v_i]
                for j, d in T.grid(4, 2):
                    with T.sblock("k_shared"):
                        v_j = T.axis.spatial(8, t * 4 + j)
                        v_d = T.axis.spatial(2, d)
                        k_shared[v_j, v_d] = T.if_then_else(v_j < 6, k[v_j, v_d], T.float16(0.0))
                for i, j, d in T.grid(2, 4, 2):
                    with T.sblock("scores_product"):
                        v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                        v_j = T.axis.spatial(8, t * 4 + j)
                        v_d = T.axis.reduce(2, d)
                        with T.init():
                            scores[v_i, v_j] = T.float32(0.0)
                        scores[v_i, v_j] = scores[v_i, v_j] + T.Cast(
                            "float32", q_shared[v_i, v_d]
                        ) * T.Cast("float32", k_shared[v_j, v_d])
                for i, j in T.grid(2, 4):
                    with T.sblock("m_update"):
                        v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                        v_j = T.axis.reduce(8, t * 4 + j)
                        m[v_i] = T.max(
                            m[v_i],
                            T.Select(
                                v_j <= v_i + 2 and v_j < 6,
                                T.float32(0.72134752044448169) * scores[v_i, v_j],
                                T.float32("-inf"),
                            ),
                        )
                for i in range(2):
                    with T.sblock("m_guard"):
                        v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                        m_safe[v_i] = T.Select(m[v_i] == T.float32("-inf"), T.float32(0.0), m[v_i])
                for i in range(2):
                    with T.sblock("factor0_make"):
                        v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                        factor0[v_i] = T.exp2(m_old[v_i] - m_safe[v_i])
                for i, j in T.grid(2, 4):
                    with T.sblock("tile0_make"):
                        v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                        v_j = T.axis.spatial(8, t * 4 + j)
                        tile0[v_i, v_j] = T.exp2(
                            T.Select(
                                v_j <= v_i + 2 and v_j < 6,
                                T.float32(0.72134752044448169) * scores[v_i, v_j],
                                T.float32("-inf"),
                            )
                            - m_safe[v_i]
                        )
                for i in range(2):
                    with T.sblock("s_carry"):
                        v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                        s[v_i] = factor0[v_i] * s[v_i]
                for i, j in T.grid(2, 4):
                    with T.sblock("s_update"):
                        v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                        v_j = T.axis.reduce(8, t * 4 + j)
                        s[v_i] = s[v_i] + tile0[v_i, v_j]
                for i, c in T.grid(2, 2):
                    with T.sblock("o_carry"):
                        v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                        v_c = T.axis.spatial(2, c)
                        o[v_i, v_c] = factor0[v_i] * o[v_i, v_c]
                for j, c in T.grid(4, 2):
                    with T.sblock("v_shared"):
                        v_j = T.axis.spatial(8, t * 4 + j)
                        v_c = T.axis.spatial(2, c)
                        v_shared[v_j, v_c] = T.if_then_else(v_j < 6, v[v_j, v_c], T.float16(0.0))
                for i, j in T.grid(2, 4):
                    with T.sblock("tile0_round"):
                        v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                        v_j = T.axis.spatial(8, t * 4 + j)
                        tile0_rounded[v_i, v_j] = T.Cast("float16", tile0[v_i, v_j])
                for i, c, j in T.grid(2, 2, 4):
                    with T.sblock("o_product"):
                        v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                        v_c = T.axis.spatial(2, c)
                        v_j = T.axis.reduce(8, t * 4 + j)
                        o[v_i, v_c] = o[v_i, v_c] + T.Cast(
                            "float32", tile0_rounded[v_i, v_j]
                        ) * T.Cast("float32", v_shared[v_j, v_c])
            for i in range(2):
                with T.sblock("s_guard"):
                    v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                    s_safe[v_i] = T.Select(s[v_i] == T.float32(0.0), T.float32(1.0), s[v_i])
            for i in range(2):
                with T.sblock("out0_scale0_make"):
                    v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                    out0_scale0[v_i] = T.float32(1.0) / s_safe[v_i]
            for i, c in T.grid(2, 2):
                with T.sblock("out_store"):
                    v_i = T.axis.spatial(4, v_row_tile * 2 + i)
                    v_c = T.axis.spatial(2, c)
                    out[v_i, v_c] = out0_scale0[v_i] * o[v_i, v_c]
