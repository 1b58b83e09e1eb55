"""Generated schedules of two products whose intermediate stays in a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cpu.fuzz.layouts import Staging, Threads, copy_by_threads, lay, spread, stage
from crossfuse import _tvm as ir
from crossfuse.workload import WorkloadSpec, parse, prim_func


@dataclass(frozen=True)
class ChainPlan:
    """A schedule of ``gemm_chain`` or ``gated_ffn``, as the primitives are called by `build`.

    Attributes
    ----------
    text : str
        The workload.
    cluster : int
        CTAs in the cluster.
    axis : str
        Their cluster axis.
    exchange : str
        "shuffle": slices of the intermediate pass between CTAs. "reduce": each CTA keeps its
        slice, and partial outputs are combined. "gather": the first products are split over the
        CTAs, and each gets the whole intermediate.
    rows : int
        Rows of a tile; 0 leaves the loop whole.
    grid : str
        What the loop over tiles is bound to, or "serial".
    ring : bool
        See `dsm_shuffle`.
    at : str
        Where slices are staged: at the "slice" loop, for a "part" of it, or outside ("all").
    accumulate : str
        "local" with threads outside the reduction, or "shared" with threads inside its steps.
    second, first : Threads
        Of the second product, and of the intermediate.
    stage_second, stage_first : Staging
        Of the weights, and of the operands of the first products.
    vector : int
        Elements that are staged together from the slabs.
    first_at : str
        Where the first products are made: in the "thread" that uses them, or by the "cta".
    decompose : str
        When initialisations are split off: "early", "late" or "" for never.
    """

    text: str
    cluster: int
    axis: str
    exchange: str
    rows: int
    grid: str
    ring: bool
    at: str
    accumulate: str
    second: Threads
    first: Threads
    stage_second: Staging
    stage_first: Staging
    vector: int
    first_at: str
    decompose: str

    @cached_property
    def spec(self) -> WorkloadSpec:
        return parse(self.text)

    def build(self) -> Any:
        return _Builder(self).run()


class _Builder:
    def __init__(self, plan: ChainPlan) -> None:
        self.plan = plan
        self.sch = ir.Schedule(prim_func(plan.spec))
        self.products = [self.sch.get_sblock(name) for name in _first_names(plan.spec)]
        self.middle = self.sch.get_sblock("hidden")
        self.second = self.sch.get_sblock("gemm1")
        self.epilogue = self.sch.get_sblock("out")
        # Blocks whose initialisation is split off at the end, and the loops where.
        self.late: list[tuple[Any, Any]] = []

    def run(self) -> Any:
        getattr(self, f"_{self.plan.exchange}")()
        for block, loop in self.late:
            self.sch.decompose_reduction(block, loop)
        return self.sch

    def _shuffle(self) -> None:
        plan, sch = self.plan, self.sch
        rank, row, column, k = self._over_columns()
        step, k = sch.split(k, [plan.cluster, None])
        outer, k = sch.split(k, [None, plan.stage_second.depth])
        sch.reorder(rank, row, column, step, outer, k)
        x = self._threads_of_second(row, column, [step, outer, k])
        at = {"slice": step, "part": outer, "all": rank}[plan.at]
        index = _read_index(sch, self.second, self.middle)
        copy = sch.dsm_shuffle(self.middle, self.second, index, at, ring=plan.ring)
        how = Staging((), "shared.dyn", 0, plan.vector, plan.stage_second.spread)
        copy_by_threads(sch, copy, 3, plan.second, how)
        if plan.stage_second.operands:
            stage(sch, self.second, 1 - index, outer, plan.second, plan.stage_second)
        self._finish_second(x, step)
        *_, row, column = sch.get_loops(self.middle)
        self._make_intermediate(row, column)

    def _over_columns(self) -> tuple[Any, ...]:
        """Bind tiles of rows to the grid and parts of the columns to the cluster."""
        plan, sch = self.plan, self.sch
        row, column, k = sch.get_loops(self.second)
        tiles = []
        if plan.rows:
            tile, row = sch.split(row, [None, plan.rows])
            tiles = [tile]
        rank, column = sch.split(column, [plan.cluster, None])
        sch.reorder(*tiles, rank, row, column, k)
        if tiles and plan.grid != "serial":
            sch.bind(tiles[0], plan.grid)
        sch.cluster_bind(rank, plan.axis)
        return rank, row, column, k

    def _threads_of_second(self, row: Any, column: Any, reduction: list[Any]) -> Any:
        """Threads outside the reduction, or inside its steps; the innermost thread loop."""
        plan, sch = self.plan, self.sch
        if plan.accumulate == "shared":
            *steps, k = reduction
            sch.reorder(*steps, row, column, k)
            return lay(sch, row, column, plan.second)[0]
        x, elements = lay(sch, row, column, plan.second)
        if not plan.second.strided:
            sch.reorder(x, *reduction, *elements)
        return x

    def _finish_second(self, x: Any, init: Any) -> None:
        """Accumulators, the output and the initialisation of the second product."""
        plan, sch = self.plan, self.sch
        sch.set_scope(self.second, 0, plan.accumulate)
        if plan.accumulate == "local":
            sch.reverse_compute_at(self.epilogue, x, preserve_unit_loops=True)
        else:
            rank = next(each for each in sch.get_loops(self.second) if _is_cluster(sch, each))
            sch.reverse_compute_at(self.epilogue, rank, preserve_unit_loops=True)
            lay(sch, *list(sch.get_loops(self.epilogue))[-2:], plan.second)
        self._decompose(self.second, init)

    def _decompose(self, block: Any, loop: Any) -> None:
        if self.plan.decompose == "early":
            self.sch.decompose_reduction(block, loop)
        elif self.plan.decompose == "late":
            self.late.append((block, loop))

    def _make_intermediate(self, row: Any, column: Any) -> None:
        """Threads over the intermediate, and its products where they are used."""
        plan, sch = self.plan, self.sch
        cta = _before(sch, self.middle, row)
        x, _ = lay(sch, row, column, plan.first)
        for product in self.products:
            if plan.first_at == "thread" or cta is None:
                sch.set_scope(product, 0, "local")
                sch.compute_at(product, x, preserve_unit_loops=True)
                self._reduce_first(product, *list(sch.get_loops(product))[-3:])
                continue
            sch.set_scope(product, 0, "shared")
            sch.compute_at(product, cta, preserve_unit_loops=True)
            i, j, k = list(sch.get_loops(product))[-3:]
            inside = lay(sch, i, j, plan.first)[1]
            self._reduce_first(product, *([] if plan.first.strided else inside), k)

    def _reduce_first(self, product: Any, *loops: Any) -> None:
        """Stage the operands of a first product by parts of its reduction."""
        plan, sch = self.plan, self.sch
        *elements, k = loops
        outer, k = sch.split(k, [None, plan.stage_first.depth])
        sch.reorder(outer, k, *elements)
        for index in plan.stage_first.operands:
            stage(sch, product, index, outer, plan.first, plan.stage_first)
        self._decompose(product, outer)

    def _reduce(self) -> None:
        """Each CTA multiplies its slice of the intermediate; partial outputs are combined."""
        plan, sch = self.plan, self.sch
        row, column, k = sch.get_loops(self.second)
        tiles = []
        if plan.rows:
            tile, row = sch.split(row, [None, plan.rows])
            tiles = [tile]
        rank, k = sch.split(k, [plan.cluster, None])
        sch.reorder(*tiles, rank, row, column, k)
        if tiles and plan.grid != "serial":
            sch.bind(tiles[0], plan.grid)
        partial = sch.dsm_reduce(self.second, rank, axis=plan.axis)
        rank, row, column, k = list(sch.get_loops(partial))[-4:]
        store = sch.cache_write(partial, 0, "local") if plan.accumulate == "local" else None
        outer, k = sch.split(k, [None, plan.stage_second.depth])
        x, elements = lay(sch, row, column, plan.second)
        if not plan.second.strided:
            sch.reorder(x, outer, k, *elements)
        if store is not None:
            sch.reverse_compute_at(store, x, preserve_unit_loops=True)
        if plan.stage_second.operands:
            index = 1 - _read_index(sch, partial, self.middle)
            stage(sch, partial, index, outer, plan.second, plan.stage_second)
        self._decompose(partial, outer)
        self._combine()
        sch.set_scope(self.middle, 0, "shared")
        sch.compute_at(self.middle, rank, preserve_unit_loops=True)
        self._make_intermediate(*list(sch.get_loops(self.middle))[-2:])

    def _combine(self) -> None:
        """Threads over the slice of the output that a CTA combines."""
        plan, sch = self.plan, self.sch
        element, ranks = list(sch.get_loops(self.second))[-2:]
        x = spread(sch, element, plan.second)
        sch.set_scope(self.second, 0, "local")
        sch.reverse_compute_at(self.epilogue, x, preserve_unit_loops=True)
        self._decompose(self.second, ranks)

    def _gather(self) -> None:
        """Every CTA gets the first products whole, and makes its columns of the output."""
        plan, sch = self.plan, self.sch
        rank, row, column, k = self._over_columns()
        outer, k = sch.split(k, [None, plan.stage_second.depth])
        sch.reorder(rank, row, column, outer, k)
        x = self._threads_of_second(row, column, [outer, k])
        index = _read_index(sch, self.second, self.middle)
        if plan.stage_second.operands:
            stage(sch, self.second, 1 - index, outer, plan.second, plan.stage_second)
        self._finish_second(x, outer)
        sch.set_scope(self.middle, 0, "shared")
        sch.compute_at(self.middle, rank, preserve_unit_loops=True)
        for product in self.products:
            self._gather_product(product)
        lay(sch, *list(sch.get_loops(self.middle))[-2:], plan.first)

    def _gather_product(self, product: Any) -> None:
        plan, sch = self.plan, self.sch
        row, column, k = sch.get_loops(product)
        tiles = []
        if plan.rows:
            tile, row = sch.split(row, [None, plan.rows])
            tiles = [tile]
        rank, k = sch.split(k, [plan.cluster, None])
        sch.reorder(*tiles, rank, row, column, k)
        partial = sch.dsm_reduce(product, rank, scatter=False, axis=plan.axis)
        i, j, k = list(sch.get_loops(partial))[-3:]
        elements = lay(sch, i, j, plan.first)[1]
        self._reduce_first(partial, *([] if plan.first.strided else elements), k)
        *_, ranks, i, j = sch.get_loops(product)
        sch.reorder(i, j, ranks)
        elements = lay(sch, i, j, plan.first)[1]
        self._decompose(product, ranks)


def _first_names(spec: WorkloadSpec) -> tuple[str, ...]:
    return ("gemm0_gate", "gemm0_up") if spec.gated else ("gemm0",)


def _read_index(sch: Any, consumer: Any, producer: Any) -> int:
    written = sch.get(producer).writes[0].source
    return next(i for i, each in enumerate(sch.get(consumer).reads) if each.source.same_as(written))


def _is_cluster(sch: Any, loop: Any) -> bool:
    return "crossfuse.cluster_axis" in sch.get(loop).annotations


def _before(sch: Any, block: Any, loop: Any) -> Any:
    """The loop around a loop of a block, or None."""
    loops = list(sch.get_loops(block))
    target = sch.get_sref(loop)
    index = next(i for i, each in enumerate(loops) if sch.get_sref(each).same_as(target))
    return loops[index - 1] if index else None
