"""TVM's `s_tir` pipeline with our passes in it.

`crossfuse._autoload` registers it under the name ``crossfuse`` and in the place of ``s_tir``'s
default: a module without our marks goes through TVM's own pipeline, so stock functions lower to
what they always did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.files import packaged_text
from crossfuse.hardware import WARP
from crossfuse.lower.buffers import order_loads, pack_registers, place_shared_memory
from crossfuse.lower.hidden import distrust_equal_indices, flatten_buffers, keep_nans, trust_again
from crossfuse.lower.kernel import ask_ahead, parts_of, read_kernel, root_of, side_by_side
from crossfuse.lower.lower_cluster import bound_registers, launch_clusters, lower_cluster
from crossfuse.lower.lower_merges import lower_merges
from crossfuse.lower.rank_barriers import meet_ranks
from crossfuse.lower.ranks import check_one_gpu
from crossfuse.lower.slabs import is_barrier, is_sync, lower_dsm_access, storage_rewrite_elsewhere
from crossfuse.lower.tree import is_call
from crossfuse.lower.verify.stores import check_global_memory, check_private_buffers
from crossfuse.lower.verify.structure import check_structure, check_vectors, check_virtual_threads
from crossfuse.lower.warp_products import multiply_by_warps
from crossfuse.markers import FAST, is_cluster_function, noted_attributes, was_lowered


def drop_markers() -> Any:
    """Pass: drop ``__syncthreads`` beside a cluster barrier, which synchronises the CTA too.

    Indices that were hidden from `ThreadSync` are restored.
    """

    def transform(func: Any) -> Any:
        func = trust_again(func) if was_lowered(func) else func
        return ir.with_body(func, ir.mutate(func.body, (ir.SeqStmt, _sequence)))

    return ir.prim_func_pass("DropMarkers", transform)


def _sequence(sequence: Any, mutator: Any) -> Any:
    statements: list[Any] = []
    for each in sequence.seq:
        mutated = mutator.mutate(each)
        statements += list(mutated.seq) if isinstance(mutated, ir.SeqStmt) else [mutated]
    kept: list[Any] = []
    after_barrier = False
    for each in statements:
        if is_barrier(each):
            while kept and is_sync(kept[-1]):
                kept.pop()
            after_barrier = True
        elif is_sync(each) and after_barrier:
            continue
        else:
            after_barrier = False
        kept.append(each)
    return ir.SeqStmt(kept) if len(kept) != 1 else kept[0]


def fast_exponentials() -> Any:
    """Pass: ``exp2`` of a float32 becomes ``ex2.approx.ftz``, right to 2 units in the last place.

    CUDA's own ``exp2f`` scales arguments so that results below 2^-126 are right too, which takes
    three more instructions (CUDA Math API, single precision functions). Functions without `FAST`
    pass through untouched.
    """

    def change(call: Any, mutator: Any) -> Any:
        call = mutator.default_mutate(call)
        if not is_call(call, "tirx.exp2") or str(call.ty) != "float32":
            return call
        text = packaged_text("crossfuse.lower", "device/math.cuh")
        return ir.cuda_func_call(
            "crossfuse_exp2", call.args[0], source_code=text, return_type="float32"
        )

    return ir.body_pass("FastExponentials", FAST, lambda body: ir.mutate(body, (ir.Call, change)))


def note_attributes() -> Any:
    """Pass: annotations of the root block become attributes of the function.

    Attributes do not survive the trace of a schedule.
    """

    def transform(func: Any) -> Any:
        for name, value in noted_attributes(func).items():
            func = func.with_attr(name, value)
        return func

    return ir.prim_func_pass("NoteAttributes", transform)


def _checking(name: str, applies: Callable[[Any], bool], check: Callable[[Any], None]) -> Any:
    """Pass: check functions to which that applies, and leave them as they are."""

    def transform(func: Any) -> Any:
        if applies(func):
            check(func)
        return func

    return ir.prim_func_pass(name, transform)


def _check_ownership(func: Any) -> None:
    """Check who touches what, after allocations are placed and before loops are merged."""
    for part in parts_of(root_of(func).block):
        kernel = read_kernel(part.body, compacted=False)
        if kernel.cluster:
            check_virtual_threads(kernel)
            check_private_buffers(kernel, part)
            check_global_memory(kernel)


Pipeline = tuple[Any, Callable[[], Any], Callable[[], Any]]


def cluster_passes(config: Any) -> list[Any]:
    """TVM's default `s_tir` passes with ours between them, up to the split of host and device.

    `config` is that of the current pass context, whose options of TVM's pipeline are honoured. Our
    passes are no-ops on functions without our marks.
    """
    options = _Options(config)
    return [*block_passes(), *_loop_passes(options), *_kernel_passes(options)]


class _Options:
    def __init__(self, config: Any) -> None:
        self.config = config

    def has(self, name: str) -> bool:
        return bool(self.config.get(name, False))

    def when(self, name: str, *passes: Any) -> list[Any]:
        return list(passes) if self.has(name) else []

    def unless(self, name: str, *passes: Any) -> list[Any]:
        return [] if self.has(name) else list(passes)


def block_passes() -> list[Any]:
    """Passes from blocks to loops: buffers get their places and exact shapes, clusters their CTAs.

    They come first in `cluster_passes`.
    """
    s = ir.s_tir.transform
    return [
        # Before TVM renames and moves the loops of the schedule.
        _checking("VerifyStructure", is_cluster_function, check_structure),
        note_attributes(),
        s.CanonicalizeLoop(),
        lower_merges(),
        s.LowerCrossThreadReduction(),
        s.LowerInitBlock(),
        s.PlanAndUpdateBufferAllocationLocation(),
        s.ConvertBlocksToOpaque(),
        _checking("VerifyOwnership", is_cluster_function, _check_ownership),
        s.LiftThreadBinding(),
        s.ManifestSharedMemoryLocalStage(),
        s.CompactBufferAllocation(),
        lower_cluster(),
        s.LowerAutoCopy(),
        s.UnifyThreadBinding(),
        s.LowerMatchBuffer(),
        s.StmtSimplify(),
        s.InjectPermutedLayout(),
        s.AnnotateIrregularLoop(),
        s.InjectSoftwarePipeline(),
        s.TransformMmaBufferLayout(),
        s.LowerOpaqueBlock(),
        multiply_by_warps(),
        ask_ahead(),
        meet_ranks(),
    ]


def _loop_passes(options: _Options) -> list[Any]:
    """Loops over flat buffers: vectors, then accesses to peers' slabs, then scalar clean-up."""
    s, x = ir.s_tir.transform, ir.tirx.transform
    return [
        *flatten_buffers(),
        x.BF16ComputeLegalize(),
        x.NarrowDataType(32),
        s.LoopPartition(),
        x.VectorizeLoop(not options.has("tirx.disable_vectorize")),
        lower_dsm_access(),
        s.InjectVirtualThread(),
        s.InjectDoubleBuffer(),
        *options.unless("tirx.disable_storage_rewrite", storage_rewrite_elsewhere()),
        *options.when("tirx.use_async_copy", s.LowerAsyncDMA()),
        s.HoistIfThenElse(),
        x.UnrollLoop(),
        s.RenormalizeSplitPattern(),
        x.StmtSimplify(),
        order_loads(),
        pack_registers(),
        x.RemoveNoOp(),
        s.RewriteUnsafeSelect(),
        fast_exponentials(),
        *options.when("tirx.instrument_bound_checkers", s.InstrumentBoundCheckers()),
        *options.when("tirx.s_tir.ldg32", s.InjectPTXLDG32(True)),
        *options.unless("tirx.disable_cse_tir", x.CommonSubexprElim()),
        *options.when("tirx.instrument_lwp", s.InstrumentProfileIntrinsics()),
    ]


def _kernel_passes(options: _Options) -> list[Any]:
    """Passes over kernels: synchronise threads, place shared memory, group CTAs into clusters."""
    s, x = ir.s_tir.transform, ir.tirx.transform
    return [
        x.FP8ComputeLegalize(),
        s.VerifyVTCMLimit(),
        s.LowerVtcmAlloc(),
        x.VerifyMemory(),
        x.AnnotateEntryFunc(),
        distrust_equal_indices(),
        s.ThreadSync("shared"),
        s.ThreadSync("shared.dyn"),
        s.ThreadSync("warp"),
        s.InferFragment(),
        s.LowerThreadAllreduce(),
        *options.when("tirx.use_async_copy", s.InjectPTXAsyncCopy()),
        *options.when("tirx.s_tir.ldg32", s.InjectPTXLDG32()),
        _checking("VerifyVectors", was_lowered, check_vectors),  # after the last rewrite
        drop_markers(),
        side_by_side(),
        place_shared_memory(),
        bound_registers(),
        launch_clusters(),
        s.MergeSharedMemoryAllocations(),
    ]


def host_passes() -> list[Any]:
    """The end of TVM's pipeline: split kernels from their host function."""
    x = ir.tirx.transform
    return [
        x.SplitHostDevice(),
        x.MakePackedAPI(),
        x.FP8StorageLegalize(),
        x.BF16StorageLegalize(),
    ]


def make_pipeline(stock: Callable[[], Pipeline]) -> Pipeline:
    """Make the pipeline that replaces `s_tir`'s default.

    `stock` is the factory of TVM's: it gives a module pass, and the factories of host and device
    finalizers. Only modules with our marks go through our passes.
    """
    stock_pass, finalize_host, finalize_device = stock()

    @ir.tvm.transform.module_pass(opt_level=0, name="crossfuse.Pipeline")
    def run(mod: Any, _ctx: Any) -> Any:
        funcs = [each for each in mod.functions.values() if isinstance(each, ir.PrimFunc)]
        for each in funcs:
            check_one_gpu(each)
        if not any(is_cluster_function(each) or noted_attributes(each) for each in funcs):
            return stock_pass(mod)
        config = ir.tvm.transform.PassContext.current().config
        kept = ir.prim_func_pass("KeepNans", _with_nans)
        return ir.tvm.ir.transform.Sequential([kept, *cluster_passes(config), *host_passes()])(mod)

    return run, finalize_host, finalize_device


def _with_nans(func: Any) -> Any:
    """Apply `keep_nans` to our functions; stock functions beside them stay as TVM has them."""
    return keep_nans(func) if is_cluster_function(func) else func


# TVM's pipeline of TIRx functions, with what keeps its passes correct.
#
# The passes of ``tvm.tirx.compilation_pipeline.tirx_pipeline`` (TVM 0.27) in their order.

# Divisions of numbers that are never negative, in a form that shows it to TVM.
#
# The number of a warp is shuffled and that of a cluster is read from a register: TVM's analyzer
# knows nothing of them but their type. Where such a number is in the dividend of a division that
# rounds down, `LowerIntrin` adds a multiple of the divisor that makes the least int32 positive, and
# the sum may leave int32 (TVM 0.27)::
#
#     (warp // 4 * 4 + threadIdx.x % 128 // 32 + 8) % 12      # Literal value ... exceeds range
#
# Both numbers are equal to something that has bounds, and the branch of those who multiply to
# more::
#
#     warp       threadIdx.x // 32
#     cluster    blockIdx.x // CTAs of a cluster
#     if warp // 4 == 0: ... else: ...            # threadIdx.x >= 128
#
# With these, dividends are seen not to be negative. Rounded towards zero, such a division has the
# same result and needs nothing added. Divisors that are powers of two become shifts and stay.

_SHUFFLE, _REGISTER = "tirx.tvm_warp_shuffle", "tirx.cuda.mov_sreg"
_ROUNDED = {ir.tirx.FloorDiv: ir.tirx.Div, ir.tirx.FloorMod: ir.tirx.Mod}


def round_towards_zero() -> Any:
    """Pass: round divisions towards zero whose dividends are not negative.

    It runs after named values are inlined where they are used.
    """

    def transform(func: Any) -> Any:
        body = _Rounding(_Numbers(func.body)).run(func.body)
        return func if body.same_as(func.body) else ir.with_body(func, body)

    return ir.prim_func_pass("RoundTowardsZero", transform)


class _Numbers:
    """Expressions in ``threadIdx`` and ``blockIdx`` for numbers of warps and clusters.

    For launches of one dimension.
    """

    def __init__(self, body: Any) -> None:
        attributes = ir.nodes(body, ir.AttrStmt)
        launch = [each for each in attributes if each.attr_key == "thread_extent"]
        self.indices = {str(each.node.thread_tag): each.node.var for each in launch}
        self.extents = {str(each.node.thread_tag): int(each.value) for each in launch}
        self.loops = {
            each.loop_var: ir.tvm.ir.Range.from_min_extent(each.min, each.extent)
            for each in ir.nodes(body, ir.For)
        }
        calls = (each for each in ir.nodes(body, ir.Bind) if isinstance(each.value, ir.Call))
        named = ((each.var, self._number(each.value)) for each in calls)
        self.names = {var: number for var, number in named if number is not None}

    @property
    def thread(self) -> Any:
        """The index of a thread in its CTA."""
        return self.indices["threadIdx.x"]

    def analyzer(self, first: int) -> Any:
        """An analyzer that knows the bounds of threads from the `first` one on."""
        known = ir.sym.Analyzer()
        for tag, index in self.indices.items():
            least = first if tag == "threadIdx.x" else 0
            known.bind(index, ir.tvm.ir.Range(least, self.extents[tag]))
        for var, values in self.loops.items():
            known.bind(var, values)
        return known

    def replaced(self, expression: Any) -> Any:
        """An expression with numbers of warps and clusters replaced by indices of the launch."""

        def call(node: Any, mutator: Any) -> Any:
            number = self._number(node)
            return mutator.default_mutate(node) if number is None else number

        named = ir.substitute(expression, self.names)
        return ir.mutate(named, (ir.Call, call))

    def _number(self, call: Any) -> Any:
        """The expression that a call equals; None if it is another call."""
        if call.op.same_as(ir.Op.get(_SHUFFLE)):
            # All threads of a warp have the number that one of them tells.
            warp = ir.tirx.floordiv(self.thread, WARP)
            return warp if ir.tvm_ffi.structural_equal(call.args[1], warp) else None
        if call.op.same_as(ir.Op.get(_REGISTER)) and str(call.args[1].value) == "clusterid.x":
            ctas = self.extents.get("clusterCtaIdx.x", 1)
            return ir.tirx.floordiv(self.indices["blockIdx.x"], ctas)
        return None


class _Rounding:
    """Rewrites statements that threads from the `first` one on execute."""

    def __init__(self, numbers: _Numbers, first: int = 0) -> None:
        self.numbers = numbers
        self.first = first
        self.known = numbers.analyzer(first)

    def run(self, body: Any) -> Any:
        kinds = ((kind, self._divide) for kind in _ROUNDED)
        return ir.mutate(body, (ir.IfThenElse, self._branch), *kinds)

    def _branch(self, node: Any, mutator: Any) -> Any:
        first = self._others(node.condition)
        if first <= self.first or node.else_case is None:
            return mutator.default_mutate(node)
        others = _Rounding(self.numbers, first).run(node.else_case)
        return ir.IfThenElse(node.condition, self.run(node.then_case), others)

    def _others(self, condition: Any) -> int:
        """The first thread that may fail a condition: n of ``thread // n == 0``, or any."""
        if not isinstance(condition, ir.tirx.EQ) or ir.constant(condition.b) != 0:
            return 0
        index = self.known.simplify(self.numbers.replaced(condition.a))
        if isinstance(index, ir.tirx.FloorDiv) and index.a.same_as(self.numbers.thread):
            return ir.constant(index.b) or 0
        return 0

    def _divide(self, node: Any, mutator: Any) -> Any:
        divisor = ir.constant(node.b)
        changed = mutator.default_mutate(node)
        if divisor is None or divisor <= 0 or divisor & (divisor - 1) == 0:
            return changed
        dividend = self.known.simplify(self.numbers.replaced(node.a))
        if self.known.const_int_bound(dividend).min_value < 0:
            return changed
        return _ROUNDED[type(node)](changed.a, changed.b)


def kernel_pipeline() -> Any:
    """The module pass from TIRx to kernels and their host functions."""
    s, x = ir.s_tir.transform, ir.tirx.transform
    return ir.tvm.ir.transform.Sequential(
        [
            x.LowerTIRx(),
            s.UnifyThreadBinding(),
            x.StmtSimplify(),
            x.LowerTIRxOpaque(),
            *flatten_buffers(),
            x.BF16ComputeLegalize(),
            x.NarrowDataType(32),
            x.VectorizeLoop(True),
            x.UnrollLoop(),
            x.StmtSimplify(),
            pack_registers(),
            round_towards_zero(),
            x.CommonSubexprElim(),
            x.FP8ComputeLegalize(),
            x.VerifyMemory(),
            x.AnnotateEntryFunc(),
            x.SplitHostDevice(),
            _cuda_passes().LowerIket(),
            x.MakePackedAPI(),
            x.FP8StorageLegalize(),
            x.BF16StorageLegalize(),
        ]
    )


def _cuda_passes() -> Any:
    from tvm.backend.cuda import transforms

    return transforms
