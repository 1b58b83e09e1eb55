"""Generated schedules of one product whose reduction is split over the CTAs of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hypothesis import strategies as st
from tvm import te

from cpu.fuzz.layouts import Staging, Threads, divisors, lay, stage, stagings, threads
from crossfuse import _tvm as ir
from crossfuse.workload import WorkloadSpec, parse, prim_func

#: What a tile loop outside the exchange becomes: a grid axis, a serial loop, or another
#: cluster axis.
KINDS = ("blockIdx.x", "blockIdx.y", "blockIdx.z", "serial", "cluster.y", "cluster.z")


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
        CTAs along x.
    scatter : bool
        See `dsm_reduce`.
    tile : tuple[int, int]
        Rows and columns of a tile; 0 leaves the loop whole.
    outside : tuple[tuple[str, str], ...]
        Tile loops ("i" or "j") outside the exchange, outermost first, with their kinds.
    ranks_first : bool
        Whether a CTA has a contiguous part of the reduction, or every cluster-th element.
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
        Loop of the combination that the elementwise block is placed at: "thread", "slice" or "".
    decompose : str
        Blocks whose initialisation is split off, in order: "p" partial, "c" combination.
    """

    text: str
    direct: bool
    cluster: int
    scatter: bool
    tile: tuple[int, int]
    outside: tuple[tuple[str, str], ...]
    ranks_first: bool
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


def function(plan: GemmPlan) -> Any:
    """The canonical function, or one whose reduction writes the output."""
    return direct_gemm(plan.spec) if plan.direct else prim_func(plan.spec)


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


class _Builder:
    def __init__(self, plan: GemmPlan) -> None:
        self.plan = plan
        self.sch = ir.Schedule(function(plan))
        self.product = self.sch.get_sblock("gemm0")
        self.epilogue = None if plan.direct else self.sch.get_sblock("out")
        self.combining: Any = None

    def run(self) -> Any:
        plan, sch = self.plan, self.sch
        if not plan.scatter and self.epilogue is not None:
            self._cluster_epilogue()
        rank, depth = self._tile()
        partial = sch.dsm_reduce(self.product, rank, scatter=plan.scatter)
        self._bind_outside(list(sch.get_loops(partial))[:depth])
        self._multiply(partial, depth)
        self._combine(depth)
        for which in plan.decompose:
            block = partial if which == "p" else self.product
            sch.decompose_reduction(block, self.inits[which])
        return sch

    inits: dict[str, Any]

    def _tile(self) -> tuple[Any, int]:
        """Split and order the loops of the product; the rank loop and the loops outside it."""
        plan, sch = self.plan, self.sch
        i, j, k = sch.get_loops(self.product)
        loops = {"i": i, "j": j, "k": k}
        outside = []
        for name, size in zip("ij", plan.tile, strict=True):
            if size:
                outer, loops[name] = sch.split(loops[name], [None, size])
                if name in dict(plan.outside):
                    outside.append((name, outer))
        order = [name for name, _ in plan.outside]
        outside.sort(key=lambda item: order.index(item[0]))
        factors = [plan.cluster, None] if plan.ranks_first else [None, plan.cluster]
        parts = sch.split(loops["k"], factors)
        rank, loops["k"] = parts if plan.ranks_first else reversed(parts)
        outer_loops = [loop for _, loop in outside]
        sch.reorder(*outer_loops, rank, *(loops[name] for name in plan.inner))
        return rank, len(outer_loops)

    def _bind_outside(self, loops: list[Any]) -> None:
        for loop, (_, kind) in zip(loops, self.plan.outside, strict=True):
            self._bind(loop, kind)

    def _bind(self, loop: Any, kind: str) -> None:
        if kind.startswith("cluster"):
            self.sch.cluster_bind(loop, kind[-1])
        elif kind != "serial":
            self.sch.bind(loop, kind)

    def _cluster_epilogue(self) -> None:
        """All-exchange moves the combination to its consumer, which comes first."""
        plan, sch = self.plan, self.sch
        loops = dict(zip("ij", sch.get_loops(self.epilogue), strict=True))
        outside = {}
        for name, size in zip("ij", plan.tile, strict=True):
            if size:
                outside[name], loops[name] = sch.split(loops[name], [None, size])
        outer = [outside[name] for name, _ in plan.outside]
        sch.reorder(*outer, loops["i"], loops["j"])
        self._bind_outside(outer)
        nest, element = sch.split(sch.fuse(loops["i"], loops["j"]), [plan.cluster, None])
        sch.cluster_bind(nest)
        self._spread(element)

    def _spread(self, element: Any) -> Any:
        """Threads over the elements of a slice; the innermost thread loop."""
        layout, sch = self.plan.threads, self.sch
        factors = [None, layout.y, layout.x] if layout.strided else [layout.y, layout.x, None]
        parts = list(sch.split(element, factors))
        _, y, x = parts if layout.strided else (None, *parts[:2])
        if layout.y > 1:
            sch.bind(y, "threadIdx.y")
        sch.bind(x, "threadIdx.x")
        return x

    def _multiply(self, partial: Any, depth: int) -> None:
        plan, sch = self.plan, self.sch
        names = {id(var): name for var, name in self._names(partial)}
        inner = {names[id(loop)]: loop for loop in self._inner(partial, depth)}
        store = sch.cache_write(partial, 0, "local") if plan.accumulate == "local" else None
        outer, k = sch.split(inner["k"], [None, plan.staging.depth])
        sch.reorder(inner["i"], inner["j"], outer, k)
        x, element = lay(sch, inner["i"], inner["j"], plan.threads)
        if not plan.threads.strided:
            sch.reorder(outer, k, *self._below(partial, x, outer))
        if store is not None:
            sch.reverse_compute_at(store, x, preserve_unit_loops=True)
        self.inits = {"p": outer}
        for index in plan.staging.operands:
            stage(sch, partial, index, outer, plan.threads, plan.staging)
