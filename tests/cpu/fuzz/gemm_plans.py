"""The strategy of `GemmPlan`: mostly plans that fit together, sometimes ones that do not."""

from __future__ import annotations

from hypothesis import strategies as st

from cpu.fuzz.gemm import GemmPlan
from cpu.fuzz.layouts import divisors, extents, rarely, stagings, threads

GRID = ("blockIdx.x", "blockIdx.y", "blockIdx.z")


@st.composite
def gemm_plans(draw: st.DrawFn) -> GemmPlan:
    """Schedules of one product with `dsm_reduce`."""
    cluster = draw(clusters())
    direct = rarely(draw, 4)
    text = draw(_specs(cluster, direct))
    dims = dict(pair.split("=") for pair in text.split(":")[1].split(",")[:3])
    m, k, n = (int(dims[name]) for name in "MKN")
    tile = draw(_tiles(m, n, cluster))
    axis = draw(st.sampled_from(("x",) * 3 + ("y", "z")))
    order = draw(outsides(tile, cluster, axis))
    rows, columns = tile[0] or m, tile[1] or n
    scatter = draw(st.booleans())
    slices = draw(st.sampled_from(_slices(rows, columns, cluster)))
    decompose = draw(st.sampled_from(["pc", "cp", "pc", "p", "c", ""]))
    return GemmPlan(
        text=text,
        direct=direct,
        cluster=cluster,
        axis=axis,
        scatter=scatter,
        slices=slices,
        tile=tile,
        outside=order,
        rank_part="middle" if rarely(draw, 30) else draw(st.sampled_from(["outer", "inner"])),
        inner="".join(draw(st.permutations("ijk"))),
        threads=draw(threads(rows, columns, max(1, rows * columns // cluster))),
        accumulate=draw(st.sampled_from(["local", "local", "slab"])),
        staging=draw(stagings(max(1, k // cluster))),
        combine_scope=draw(st.sampled_from(["local", "shared"])) if scatter else "",
        epilogue_at=_epilogue(draw, scatter, direct),
        decompose=decompose,
    )


def _slices(rows: int, columns: int, cluster: int) -> list[str]:
    """Ways to cut a tile into boxes; the fused loops where there is none."""
    ways = [name for name, extent in (("i", rows), ("j", columns)) if extent % cluster == 0]
    return ways or ["ij"]


def _epilogue(draw: st.DrawFn, scatter: bool, direct: bool) -> str:
    if scatter or direct:
        return "slice" if rarely(draw, 6) else "thread"
    return draw(st.sampled_from(["thread", "late"]))


@st.composite
def clusters(draw: st.DrawFn) -> int:
    """Cluster sizes, the impossible 17 among them."""
    if rarely(draw, 40):
        return 17
    return draw(st.sampled_from([1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 16, 16, 9, 10, 12, 13]))


@st.composite
def _specs(draw: st.DrawFn, cluster: int, direct: bool) -> str:
    m, n = draw(extents(40)), draw(extents(96, 4))
    if rarely(draw, 2):
        n = cluster * max(1, n // cluster)
    k = draw(extents(80, 1)) if rarely(draw, 6) else cluster * draw(st.integers(1, 80 // cluster))
    combine = draw(st.sampled_from(["sum", "sum", "max", "min"] + ([] if direct else ["prod"])))
    dtype = "float32" if direct else draw(st.sampled_from(["float16", "bfloat16", "float32"]))
    weights = "kn" if direct else draw(st.sampled_from(["kn", "nk"]))
    return f"gemm:M={m},K={k},N={n},dtype={dtype},weights={weights},combine={combine}"


@st.composite
def _tiles(draw: st.DrawFn, m: int, n: int, cluster: int) -> tuple[int, int]:
    """Tile sizes: 0 or a divisor for the most part, often with elements for every CTA."""

    def size(extent: int) -> int:
        if rarely(draw, 8):
            return draw(st.integers(1, extent))
        return draw(st.sampled_from([0, *divisors(extent, extent)[-4:]]))

    tile = size(m), size(n)
    if (tile[0] or m) % cluster and (tile[1] or n) % cluster and not rarely(draw, 5):
        boxes = [(a, b) for a in divisors(m, m) for b in divisors(n, n)]
        fitting = [(a, b) for a, b in boxes if a % cluster == 0 or b % cluster == 0]
        return draw(st.sampled_from(fitting or [(0, 0)]))
    return tile


@st.composite
def outsides(
    draw: st.DrawFn, tile: tuple[int, int], cluster: int, axis: str
) -> tuple[tuple[str, str], ...]:
    """Order and binding of the tile loops: grid axes, serial, rarely a second cluster axis."""
    names = [name for name, size in zip("ij", tile, strict=True) if size]
    axes = list(draw(st.permutations(GRID)))
    order = []
    for name in draw(st.permutations(names)) if names else []:
        kind = axes.pop()
        if rarely(draw, 5):
            kind = "serial"
        elif cluster <= 8 and rarely(draw, 6):
            kind = "cluster." + draw(st.sampled_from([each for each in "xyz" if each != axis]))
        order.append((name, kind))
    return tuple(order)
