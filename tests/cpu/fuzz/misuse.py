"""Primitives called where nobody asked for them: on any block, any loop, in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from cpu.fuzz.chain import ChainPlan
from cpu.fuzz.chain_plans import chain_plans
from cpu.fuzz.gemm import GemmPlan, direct_gemm
from cpu.fuzz.gemm_plans import gemm_plans
from crossfuse import _tvm as ir
from crossfuse.errors import ScheduleRefused
from crossfuse.markers import CLUSTER_AXIS, DSM_SHUFFLE
from crossfuse.workload import WorkloadSpec, parse, prim_func

_TAGS = ("threadIdx.x", "threadIdx.y", "blockIdx.x", "blockIdx.y", "clusterCtaIdx.x", "vthread")
_DIRECT = (
    "gemm:M=4,K=8,N=8,dtype=float32",
    "gemm:M=6,K=12,N=9,dtype=float32,combine=max",
    "gemm:M=16,K=16,N=16,dtype=float32",
)
_CANONICAL = (
    "gemm:M=6,K=5,N=9,dtype=float16,weights=nk,combine=max",
    "gemm_chain:M=4,K=8,N=8,L=4,dtype=float16",
    "gated_ffn:M=3,K=6,N=8,L=8,dtype=bfloat16",
)
_SCOPES = ("shared", "shared.dyn", "global", "local", "shared.dsm")


@dataclass(frozen=True)
class Call:
    """One call of a primitive.

    Attributes
    ----------
    name : str
        A key of `CALLS`.
    block, loop : int
        Which block, and which of its loops, counted modulo what there is.
    choice : int
        Which argument, counted likewise.
    """

    name: str
    block: int
    loop: int
    choice: int

    def apply(self, sch: Any) -> None:
        blocks = list(sch.get_child_blocks(sch.get_sblock("root")))
        block = blocks[self.block % len(blocks)]
        loops = list(sch.get_loops(block))
        if loops:
            CALLS[self.name](
                _Target(sch, blocks, block, loops, self.loop % len(loops)), self.choice
            )


@dataclass(frozen=True)
class _Target:
    sch: Any
    blocks: list[Any]
    block: Any
    loops: list[Any]
    index: int

    @property
    def loop(self) -> Any:
        return self.loops[self.index]

    @property
    def pair(self) -> list[Any]:
        return self.loops[self.index : self.index + 2]


def _of(choices: Any, n: int) -> Any:
    return choices[n % len(choices)]


def _shuffle(t: _Target, n: int) -> None:
    consumers = list(t.sch.get_consumers(t.block))
    if consumers:
        at = _of(list(t.sch.get_loops(consumers[0])), t.index)
        t.sch.dsm_shuffle(t.block, consumers[0], n % 2, at, ring=n % 3 > 0)


def _forge(t: _Target, n: int) -> None:
    """Marks that only our primitives should set."""
    if n % 3 < 2:
        t.sch.annotate(t.loop, CLUSTER_AXIS, "xw"[n % 3])
    else:
        t.sch.annotate(t.block, DSM_SHUFFLE, "ring")


def _transpose(t: _Target, n: int) -> None:
    """Of an intermediate; transposed outputs would be right, but not what the check expects."""
    if list(t.sch.get_consumers(t.block)):
        t.sch.transform_layout(t.block, ("write", 0), lambda *index: index[::-1])


def _unmark(t: _Target, n: int) -> None:
    if CLUSTER_AXIS in t.sch.get(t.loop).annotations:
        t.sch.unannotate(t.loop, CLUSTER_AXIS)


CALLS: dict[str, Callable[[_Target, int], Any]] = {
    "unroll": lambda t, n: t.sch.unroll(t.loop),
    "vectorize": lambda t, n: t.sch.vectorize(t.loop),
    "parallel": lambda t, n: t.sch.parallel(t.loop),
    "bind": lambda t, n: t.sch.bind(t.loop, _of(_TAGS, n)),
    "cluster_bind": lambda t, n: t.sch.cluster_bind(t.loop, _of("xyz", n)),
    "dsm_reduce": lambda t, n: t.sch.dsm_reduce(t.block, t.loop, scatter=n % 2 == 0),
    "dsm_shuffle": _shuffle,
    "set_scope": lambda t, n: t.sch.set_scope(t.block, 0, _of(_SCOPES, n)),
    "storage_align": lambda t, n: t.sch.storage_align(t.block, 0, n % 2, 32, 8),
    "double_buffer": lambda t, n: t.sch.annotate(t.block, "double_buffer_scope", 0),
    "pragma_unroll": lambda t, n: t.sch.annotate(t.loop, "pragma_auto_unroll_max_step", 16),
    "split": lambda t, n: t.sch.split(t.loop, [None, n + 1]),
    "fuse": lambda t, n: t.sch.fuse(*t.pair),
    "swap": lambda t, n: t.sch.reorder(*reversed(t.pair)),
    "inline": lambda t, n: t.sch.compute_inline(t.block),
    "reverse_inline": lambda t, n: t.sch.reverse_compute_inline(t.block),
    "cache_read": lambda t, n: t.sch.cache_read(t.block, n % 3, _of(_SCOPES, n)),
    "cache_write": lambda t, n: t.sch.cache_write(t.block, 0, _of(_SCOPES, n)),
    "compute_at": lambda t, n: t.sch.compute_at(_of(t.blocks, n), t.loop),
    "reverse_compute_at": lambda t, n: t.sch.reverse_compute_at(_of(t.blocks, n), t.loop),
    "decompose": lambda t, n: t.sch.decompose_reduction(t.block, t.loop),
    "rfactor": lambda t, n: t.sch.rfactor(t.loop, 0),
    "transpose": _transpose,
    "unit_loop": lambda t, n: t.sch.add_unit_loop(t.loop),
    "forge": _forge,
    "unmark": _unmark,
}

#: Calls of primitives of any kind.
calls = st.builds(
    Call,
    name=st.sampled_from(sorted(CALLS)),
    block=st.integers(0, 11),
    loop=st.integers(0, 9),
    choice=st.integers(0, 7),
)


def apply_all(sch: Any, calls: tuple[Call, ...]) -> None:
    """Make calls one after the other; one that is refused changes nothing."""
    for call in calls:
        try:
            call.apply(sch)
        except (ScheduleRefused, ir.ScheduleError):
            continue


@dataclass(frozen=True)
class MisusePlan:
    """A plan, and calls after it that it was not made for."""

    plan: GemmPlan | ChainPlan
    calls: tuple[Call, ...]

    @property
    def spec(self) -> WorkloadSpec:
        return self.plan.spec

    def build(self) -> Any:
        sch = self.plan.build()
        apply_all(sch, self.calls)
        return sch


@dataclass(frozen=True)
class WildPlan:
    """Calls on an unscheduled function, whose nests without a CTA or thread get a grid at last.

    Attributes
    ----------
    text : str
        The workload.
    direct : bool
        See `GemmPlan`.
    calls : tuple[Call, ...]
        In order.
    """

    text: str
    direct: bool
    calls: tuple[Call, ...]

    @property
    def spec(self) -> WorkloadSpec:
        return parse(self.text)

    def build(self) -> Any:
        sch = ir.Schedule(direct_gemm(self.spec) if self.direct else prim_func(self.spec))
        apply_all(sch, self.calls)
        for block in sch.get_child_blocks(sch.get_sblock("root")):
            apply_all(sch, tuple(_grid(sch, block)))
        return sch


def _grid(sch: Any, block: Any) -> list[Call]:
    loops = [sch.get(each) for each in sch.get_loops(block)]
    bound = [each.thread_binding is not None or CLUSTER_AXIS in each.annotations for each in loops]
    if not loops or any(bound):
        return []
    names = [sch.get(each).name_hint for each in sch.get_child_blocks(sch.get_sblock("root"))]
    return [Call("bind", names.index(sch.get(block).name_hint), 0, _TAGS.index("blockIdx.x"))]


@st.composite
def misuse_plans(draw: st.DrawFn) -> MisusePlan:
    """Complete schedules with one to three calls more."""
    plan = draw(st.one_of(gemm_plans(), chain_plans()))
    return MisusePlan(plan, tuple(draw(st.lists(calls, min_size=1, max_size=3))))


@st.composite
def wild_plans(draw: st.DrawFn) -> WildPlan:
    """Up to ten calls on a small function."""
    direct = draw(st.booleans())
    texts = _DIRECT if direct else _CANONICAL
    few_or_many = st.lists(calls, min_size=1, max_size=10)
    return WildPlan(draw(st.sampled_from(texts)), direct, tuple(draw(few_or_many)))
