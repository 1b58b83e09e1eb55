"""The strategy of `ChainPlan`: mostly plans that fit together, sometimes ones that do not."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cpu.fuzz.chain import ChainPlan
from cpu.fuzz.gemm_plans import GRID, clusters
from cpu.fuzz.layouts import divisors, extents, rarely, stagings, threads
from crossfuse.workload import parse


@st.composite
def chain_plans(draw: st.DrawFn) -> ChainPlan:
    """Schedules of two products with `dsm_shuffle` or `dsm_reduce`."""
    cluster = draw(clusters())
    exchange = draw(st.sampled_from(["shuffle", "shuffle", "shuffle", "reduce", "gather"]))
    text = draw(_specs(cluster, exchange))
    spec = parse(text)
    rows = draw(st.sampled_from([0, *divisors(spec.M, spec.M)]))
    if rarely(draw, 8):
        rows = draw(st.integers(1, spec.M))
    tile = rows or spec.M
    width = {"reduce": spec.L}.get(exchange, max(1, spec.L // cluster))
    hidden = {"gather": spec.N}.get(exchange, max(1, spec.N // cluster))
    share = max(1, tile * width // (cluster if exchange == "reduce" else 1))
    return ChainPlan(
        text=text,
        cluster=cluster,
        axis=draw(st.sampled_from(("x",) * 3 + ("y", "z"))),
        exchange=exchange,
        rows=rows,
        grid="serial" if rarely(draw, 4) else draw(st.sampled_from(GRID)),
        **draw(_orders()),
        accumulate=draw(st.sampled_from(["local", "local", "shared"])),
        **draw(_two_layouts(tile, width, hidden, share)),
        stage_second=draw(stagings(spec.N if exchange == "gather" else max(1, spec.N // cluster))),
        stage_first=draw(stagings(max(1, spec.K // cluster) if exchange == "gather" else spec.K)),
        vector=draw(st.sampled_from([1, 1, 1, 2, 4, 8])),
        first_at=draw(st.sampled_from(["thread", "thread", "cta"])),
    )


@st.composite
def _orders(draw: st.DrawFn) -> dict[str, Any]:
    """Order of the slices, where they are staged, and when initialisations are split off."""
    at = "all" if rarely(draw, 6) else draw(st.sampled_from(["slice", "part"]))
    ring = draw(st.booleans()) if at != "all" else rarely(draw, 8)
    whens = ["early", "early", "late", *([] if ring and not rarely(draw, 8) else [""])]
    return {"ring": ring, "at": at, "decompose": draw(st.sampled_from(whens))}


@st.composite
def _two_layouts(draw: st.DrawFn, rows: int, width: int, hidden: int, share: int) -> dict[str, Any]:
    """Layouts of both nests, with the same threads: TVM launches a kernel with one shape."""
    second = draw(threads(rows, width, share))
    if rarely(draw, 12):
        return {"second": second, "first": draw(threads(rows, hidden, rows * hidden))}
    fits = rows % second.y == 0 and hidden % second.x == 0
    flat = draw(st.booleans()) if fits else True
    first = type(second)(second.y, second.x, flat, draw(st.booleans()))
    return {"second": second, "first": first}


@st.composite
def _specs(draw: st.DrawFn, cluster: int, exchange: str) -> str:
    kind = draw(st.sampled_from(["gemm_chain", "gated_ffn"]))
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32"]))
    weights = draw(st.sampled_from(["kn", "nk"]))
    act = draw(st.sampled_from(["relu", "silu", "gelu", "identity", "x*x"]))
    m = draw(extents(40))
    exact = not rarely(draw, 8)
    n, width, k = (draw(extents(96, 4)), draw(extents(96, 4)), draw(extents(80)))
    if exact:
        n, width = _multiple(n, cluster), _multiple(width, cluster)
        k = _multiple(k, cluster) if exchange == "gather" else k
    options = f"dtype={dtype},weights={weights},act={act}"
    return f"{kind}:M={m},K={k},N={n},L={width},{options}"


def _multiple(extent: int, cluster: int) -> int:
    return cluster * max(1, extent // cluster)
