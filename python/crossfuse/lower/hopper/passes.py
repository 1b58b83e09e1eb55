"""TVM's pipeline of TIRx functions, with what keeps its passes correct.

The passes of ``tvm.tirx.compilation_pipeline.tirx_pipeline`` (TVM 0.27) in their order.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.hidden_indices import flatten_buffers
from crossfuse.lower.pack_registers import pack_registers
from crossfuse.lower.passes import prim_func_pass

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

    return prim_func_pass("RoundTowardsZero", transform)


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
