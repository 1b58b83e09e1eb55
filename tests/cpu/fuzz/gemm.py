"""Generated schedules of one product whose reduction is split over the CTAs of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import te

from cpu.fuzz.layouts import Staging, Threads, lay, spread, stage
from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import bindings, binds
from crossfuse.workload import WorkloadSpec, parse, prim_func


@dataclass(frozen=True)
class GemmPlan:
    """A schedule of ``gemm``, as the primitives are called by `build`.

    Attributes
    ----------
    text : str
        The workload.
    direct : bool
        Whether the reduction writes the output itself, or an elementwise block after it does.
    cluster : int
        CTAs that share the reduction.
    axis : str
        Their cluster axis.
    scatter : bool
        See `dsm_reduce`.
    slices : str
        What a CTA has of the tile after an all-exchange: rows "i", columns "j", or a part of the
        fused loops, "ij".
    tile : tuple[int, int]
        Rows and columns of a tile; 0 leaves the loop whole.
    outside : tuple[tuple[str, str], ...]
        The tile loops ("i" or "j"), outermost first, each with what it is bound to: a grid axis,
        another cluster axis such as "cluster.y", or "serial".
    rank_part : str
        The part of the reduction that becomes the rank: "outer", "inner", or the "middle" of
        three, whose first part stays outside the exchange.
    inner : str
        Order of the loops inside the rank loop, a permutation of "ijk".
    threads : Threads
        Of both nests.
    accumulate : str
        Where partial sums are taken: "local" registers, or the "slab" itself.
    staging : Staging
        Of the partial products.
    combine_scope : str
        Scope of the combined tile.
    epilogue_at : str
        After a reduce-scatter the loop of the combination that the elementwise block is placed
        at, "thread" or "slice"; before an all-exchange "thread" binds the block to threads at
        once, and "late" does so after the exchange.
    decompose : str
        Blocks whose initialisation is split off, in order: "p" partial, "c" combination.
    """

    text: str
    direct: bool
    cluster: int
    axis: str
    scatter: bool
    slices: str
    tile: tuple[int, int]
    outside: tuple[tuple[str, str], ...]
    rank_part: str
    inner: str
    threads: Threads
    accumulate: str
    staging: Staging
    combine_scope: str
    epilogue_at: str
    decompose: str

    @cached_property
    def spec(self) -> WorkloadSpec:
        return parse(self.text)

    def build(self) -> Any:
        return _Builder(self).run()


def direct_gemm(spec: WorkloadSpec) -> Any:
    """A float32 product without an elementwise block after it."""
    left = te.placeholder((spec.M, spec.K), "float32", "A")
    right = te.placeholder((spec.K, spec.N), "float32", "B")
    k = te.reduce_axis((0, spec.K), "k")
    reduce = {"sum": te.sum, "max": te.max, "min": te.min}[spec.combine]
    out = te.compute(
        (spec.M, spec.N), lambda i, j: reduce(left[i, k] * right[k, j], axis=k), name="gemm0"
    )
    return te.create_prim_func([left, right, out])


def tile_loops(
    sch: Any, loops: dict[str, Any], tile: tuple[int, int], order: tuple[tuple[str, str], ...]
) -> list[Any]:
    """Split rows and columns into tiles; `loops` keeps the inner parts, the outer come back."""
    outer = {}
    for name, size in zip("ij", tile, strict=True):
        if size:
            outer[name], loops[name] = sch.split(loops[name], [None, size])
    return [outer[name] for name, _ in order]


def bind_outside(sch: Any, loops: list[Any], order: tuple[tuple[str, str], ...]) -> None:
    """Bind the tile loops as a plan says."""
    for loop, (_, kind) in zip(loops, order, strict=True):
        if kind.startswith("cluster"):
            sch.cluster_bind(loop, kind[-1])
        elif kind != "serial":
            sch.bind(loop, kind)


def _place(variable: Any, values: list[Any]) -> int:
    """Which binding a loop drives; a unit loop that drives none belongs to the reduction."""
    return next((i for i, value in enumerate(values) if binds(variable, value)), len(values))


class _Builder:
    def __init__(self, plan: GemmPlan) -> None:
        self.plan = plan
        self.sch = ir.Schedule(direct_gemm(plan.spec) if plan.direct else prim_func(plan.spec))
        self.product = self.sch.get_sblock("gemm0")
        self.epilogue = None if plan.direct else self.sch.get_sblock("out")
        # Loops at which initialisations are split off, by block.
        self.inits: dict[str, Any] = {}

    def run(self) -> Any:
        plan, sch = self.plan, self.sch
        if not plan.scatter and self.epilogue is not None:
            self._cluster_epilogue()
        rank, depth = self._tile()
        partial = sch.dsm_reduce(self.product, rank, scatter=plan.scatter, axis=plan.axis)
        if plan.scatter or plan.direct:
            bind_outside(sch, list(sch.get_loops(partial))[: len(plan.outside)], plan.outside)
        self._multiply(partial)
        self._combine(depth)
        if plan.epilogue_at == "late":
            spread(sch, list(sch.get_loops(self.epilogue))[-1], plan.threads)
        for which in plan.decompose:
            block = partial if which == "p" else self.product
            sch.decompose_reduction(block, self.inits[which])
        return sch

    def _tile(self) -> tuple[Any, int]:
        """Split and order the loops of the product; the rank loop and how many are outside it."""
        plan, sch = self.plan, self.sch
        loops = dict(zip("ijk", sch.get_loops(self.product), strict=True))
        outside = tile_loops(sch, loops, plan.tile, plan.outside)
        if plan.rank_part == "inner":
            loops["k"], rank = sch.split(loops["k"], [None, plan.cluster])
        elif plan.rank_part == "outer":
            rank, loops["k"] = sch.split(loops["k"], [plan.cluster, None])
        else:
            temporal, rank, loops["k"] = sch.split(loops["k"], [2, plan.cluster, None])
            outside.append(temporal)
        sch.reorder(*outside, rank, *(loops[name] for name in plan.inner))
        return rank, len(outside)

    def _cluster_epilogue(self) -> None:
        """All-exchange moves the combination to its consumer, which comes first."""
        plan, sch = self.plan, self.sch
        loops = dict(zip("ij", sch.get_loops(self.epilogue), strict=True))
        outside = tile_loops(sch, loops, plan.tile, plan.outside)
        sch.reorder(*outside, loops["i"], loops["j"])
        bind_outside(sch, outside, plan.outside)
        row, column = loops["i"], loops["j"]
        if plan.slices == "ij":
            nest, element = sch.split(sch.fuse(row, column), [plan.cluster, None])
        else:
            nest, part = sch.split(loops[plan.slices], [plan.cluster, None])
            row, column = (part, column) if plan.slices == "i" else (row, part)
            sch.reorder(nest, row, column)
            element = sch.fuse(row, column)
        sch.cluster_bind(nest, plan.axis)
        if plan.epilogue_at == "thread":
            spread(sch, element, plan.threads)

    def _multiply(self, partial: Any) -> None:
        plan, sch = self.plan, self.sch
        row, column, k = self._inner_loops(partial)
        store = sch.cache_write(partial, 0, "local") if plan.accumulate == "local" else None
        outer, k = sch.split(k, [None, plan.staging.depth])
        sch.reorder(row, column, outer, k)
        x, elements = lay(sch, row, column, plan.threads)
        if not plan.threads.strided:
            sch.reorder(x, outer, k, *elements)
        if store is not None:
            sch.reverse_compute_at(store, x, preserve_unit_loops=True)
        self.inits["p"] = outer
        for index in plan.staging.operands:
            stage(sch, partial, index, outer, plan.threads, plan.staging)

    def _inner_loops(self, partial: Any) -> list[Any]:
        """Rows, columns and reduction of the partial tile, whatever order they are in."""
        sch = self.sch
        values = [value for _, value in bindings(sch, partial)][1:]
        inner = list(sch.get_loops(partial))[-3:]
        return sorted(inner, key=lambda loop: _place(sch.get(loop).loop_var, values))

    def _combine(self, depth: int) -> None:
        plan, sch = self.plan, self.sch
        if plan.scatter:
            slice_loop, element, ranks = list(sch.get_loops(self.product))[depth:][-3:]
            x = spread(sch, element, plan.threads)
            self.inits["c"] = ranks
        else:
            *_, ranks, row, column = sch.get_loops(self.product)
            slice_loop, x = ranks, spread(sch, sch.fuse(row, column), plan.threads)
            y = list(sch.get_loops(self.product))[-3]
            sch.reorder(*([y] if plan.threads.y > 1 else []), x, ranks)
            self.inits["c"] = ranks
            if plan.direct:
                (store,) = sch.get_consumers(self.product)
                spread(sch, list(sch.get_loops(store))[-1], plan.threads)
        if plan.combine_scope and not plan.direct:
            sch.set_scope(self.product, 0, plan.combine_scope)
        if self.epilogue is not None and plan.scatter:
            at = x if plan.epilogue_at == "thread" else slice_loop
            sch.reverse_compute_at(self.epilogue, at, preserve_unit_loops=True)
