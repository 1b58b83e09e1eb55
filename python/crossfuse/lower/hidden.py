"""What passes of TVM get wrong, hidden from them: equal indices, and maxima of NaN.

`ThreadSync` mistakes equal indices for one thread, and `FlattenBuffer` simplifies some wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.files import packaged_text
from crossfuse.lower.tree import (
    Bounds,
    Site,
    StoredElements,
    are_apart,
    bounds,
    is_call,
    sites,
    stored_elements,
)
from crossfuse.markers import LOWERED, SHARED_SCOPES
from crossfuse.workload.dtypes import is_float

# Keeps TVM's `ThreadSync` from mistaking equal indices for one thread.
#
# `ThreadSync` leaves out a ``__syncthreads`` where two accesses of shared memory have the same
# index: it takes them for the same thread. That holds only if no two threads share an index::
#
#     for k in range(16):
#         if threadIdx.y < 1:
#             S[threadIdx.x] = D[k, threadIdx.x]
#         acc += S[threadIdx.x]          # with threadIdx.y = 1: another thread stored it
#
# Where threads share an index, each store and the loads get it by detours of another length through
# another type, which `ThreadSync` does not see through. It also looks only at a store and a load,
# never at two stores, so that of several stores each reads what it overwrites. `trust_again` takes
# all that away. One store alone needs none of it: `verify.stores.check_distinct_stores` proves that
# one thread stores an element.


def meeting_stores(body: Any, threads: Mapping[Any, int]) -> list[Any]:
    """Stores to an element of shared memory that another store reaches from another thread.

    Of a kernel with flat buffers, in program order, with those that cannot be analysed; `threads`
    maps variables of threads to their extents.
    """
    values = {each.var: each.value for each in ir.nodes(body, ir.Bind)}
    by_buffer: dict[Any, list[Site]] = {}
    for site in sites(body):
        if isinstance(site.node, ir.BufferStore) and is_shared(site.node.buffer):
            by_buffer.setdefault(site.node.buffer, []).append(site)
    places = {var: (0, extent) for var, extent in threads.items()}
    return [
        site.node
        for stores in by_buffer.values()
        if len(stores) > 1
        for site in _meeting([(each, _elements(each, places, values)) for each in stores])
    ]


def is_shared(buffer: Any) -> bool:
    """Whether a variable is a buffer in shared memory of the CTA."""
    return ir.is_buffer_var(buffer) and str(buffer.scope()) in SHARED_SCOPES


def _meeting(stores: list[tuple[Site, StoredElements | None]]) -> list[Site]:
    import numpy as np

    known = [stored for _, stored in stores if stored is not None]
    if len(known) < len(stores):
        return [site for site, _ in stores]
    contested = StoredElements.joined(known).of_several_actors()
    return [site for site, each in stores if each and np.isin(each.elements, contested).any()]


def _elements(site: Site, threads: Bounds, values: dict[Any, Any]) -> StoredElements | None:
    (index,) = site.node.indices
    serial: dict[Any, tuple[int | None, int | None]] = {}
    if isinstance(index, ir.tirx.Ramp):
        lane = ir.Var("lane", "int32")
        serial[lane] = (0, int(index.lanes))
        index = index.base + index.stride * lane
    index = _expanded(index, values)
    conditions = [_expanded(each, values) for each in site.conditions]
    used = {var for each in (index, *conditions) for var in ir.variables(each)}
    serial |= bounds(each for each in site.loops if each.loop_var in used)
    return stored_elements([index], threads, serial, conditions)


def _expanded(expression: Any, values: dict[Any, Any]) -> Any:
    """An expression with the values of variables that were bound to parts of it."""
    while any(var in values for var in ir.variables(expression)):
        expression = ir.substitute(expression, values)
    return expression


_DETOUR = "int64"


def distrust_equal_indices() -> Any:
    """Pass, before `ThreadSync`: hide indices of shared memory that several threads share.

    Looks at cluster kernels only.
    """
    return ir.body_pass("DistrustEqualIndices", LOWERED, lambda body: _HidingFromSync().run(body))


def trust_again(func: Any) -> Any:
    """Undo `distrust_equal_indices` once `ThreadSync` has run."""

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if not is_shared(node.source):
            return node
        return ir.tirx.BufferLoad(node.source, [_seen(each) for each in node.indices])

    def store(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if not is_shared(node.buffer):
            return node
        value = _without_load(node.value)
        return ir.BufferStore(node.buffer, value, [_seen(each) for each in node.indices])

    return ir.with_body(func, ir.mutate(func.body, (ir.TensorLoad, load), (ir.BufferStore, store)))


class _HidingFromSync:
    def __init__(self) -> None:
        self.threads: dict[Any, int] = {}
        self.meeting: list[Any] = []

    def run(self, body: Any) -> Any:
        for node in ir.nodes(body, ir.AttrStmt):
            self._enter(node)
        if not self.threads:
            return body
        self.meeting = meeting_stores(body, self.threads)
        return ir.mutate(body, (ir.TensorLoad, self._load), (ir.BufferStore, self._store))

    def _enter(self, node: Any) -> None:
        if node.attr_key != "thread_extent" or not node.node.thread_tag.startswith("threadIdx"):
            return
        extent = ir.constant(node.value)
        if extent is not None and extent > 1:
            self.threads[node.node.var] = int(extent)

    def _load(self, node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if not is_shared(node.source) or self._is_of_one_thread(node.indices):
            return node
        # More detours than any store.
        return _load_of(node.source, node.indices, len(self.meeting) + 1)

    def _store(self, node: Any, mutator: Any) -> Any:
        order = [i for i, each in enumerate(self.meeting, 1) if each.same_as(node)]
        node = mutator.default_mutate(node)
        if not order:
            return node
        load = _load_of(node.buffer, node.indices, order[0])
        return ir.BufferStore(node.buffer, _with_load(node.value, load), load.indices)

    def _is_of_one_thread(self, indices: Any) -> bool:
        """Whether no two threads have this index: it is linear, with steps wide enough."""
        (index,) = indices
        if ir.tvm.DataType(str(index.ty)).lanes != 1:
            return False
        found = ir.sym.detect_linear_equation(index, list(self.threads))
        if not len(found):
            return False
        constants = [ir.constant(each) for each in list(found)[:-1]]
        steps = [abs(each) for each in constants if each is not None]
        if len(steps) < len(constants):
            return False
        return are_apart(zip(steps, self.threads.values(), strict=True))


def _load_of(buffer: Any, indices: Any, detours: int) -> Any:
    return ir.tirx.BufferLoad(buffer, [_hidden(each, detours) for each in indices])


def _hidden(index: Any, detours: int) -> Any:
    if isinstance(index, ir.tirx.Ramp):
        return ir.tirx.Ramp(_hidden(index.base, detours), index.stride, index.lanes)
    if ir.tvm.DataType(str(index.ty)).lanes != 1:
        return index
    for _ in range(detours):
        index = ir.tirx.Cast(str(index.ty), ir.tirx.Cast(_DETOUR, index))
    return index


def _seen(index: Any) -> Any:
    if isinstance(index, ir.tirx.Ramp):
        return ir.tirx.Ramp(_seen(index.base), index.stride, index.lanes)
    inner = index.value if isinstance(index, ir.tirx.Cast) else None
    if isinstance(inner, ir.tirx.Cast) and str(ir.tvm.DataType(str(inner.ty))) == _DETOUR:
        return _seen(inner.value)
    return index


def _with_load(value: Any, load: Any) -> Any:
    always = ir.tirx.const(True, "bool")
    return ir.Call(ir.Op.get(ir.IF_THEN_ELSE), [always, value, load], ret_ty=value.ty)


def _without_load(value: Any) -> Any:
    if not is_call(value, ir.IF_THEN_ELSE):
        return value
    condition, kept, _ = value.args
    return kept if ir.constant(condition) == 1 else value


# Flat buffers without TVM's wrong indices.
#
# `FlattenBuffer` simplifies indices as maps of iterators (TVM 0.27, ``iter_map_simplify``). Where a
# dividend has iterators and something that is none, a cluster's id or a constant for example, the
# result may be wrong. The remainder of a sum is taken for the sum of a remainder::
#
#     (id * 24 + threadIdx.x % 128) // 32
#     (id * 24) // 32 + (threadIdx.x + id * 24 % 32) % 128 // 32        # wrong where % 128 wraps
#
# and beside iterators that overlap, a constant is forgotten::
#
#     (threadIdx.x // 8 * 4 + i + 17) // 32                             # i < 16
#     (threadIdx.x // 8 * 4 + i) // 32
#
# Such indices go through `FlattenBuffer` as arguments of a call, where iterator maps do not reach;
# they are simplified afterwards by what else TVM knows of integers.

_CALL = "tirx.reinterpret"


def flatten_buffers() -> list[Any]:
    """Passes: `FlattenBuffer` between two that hide questionable indices from it and restore them.

    A function without such indices gets those of `FlattenBuffer` unchanged.
    """
    return [
        ir.prim_func_pass(
            "HideIndices", lambda func: _changed(func, _HidingFromMaps(func.body).index)
        ),
        ir.tirx.transform.FlattenBuffer(),
        ir.prim_func_pass("ShowIndices", _shown),
    ]


def _shown(func: Any) -> Any:
    """A function without the calls of `_HidingFromMaps`, of which most functions have none."""
    hidden = any(map(_is_hidden, ir.nodes(func.body, ir.Call)))
    return _changed(func, _ShowingToAll(func.body).index) if hidden else func


def _changed(func: Any, change: Any) -> Any:
    """A function with `change` applied to all indices; the same object if none differs."""

    def access(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        indices = [change(each) for each in node.indices]
        if _same(indices, node.indices):
            return node
        if isinstance(node, ir.BufferStore):
            return ir.BufferStore(node.buffer, node.value, indices)
        return ir.tirx.BufferLoad(node.source, indices)

    body = ir.mutate(func.body, (ir.TensorLoad, access), (ir.BufferStore, access))
    return func if body.same_as(func.body) else ir.with_body(func, body)


class _Iterators:
    """Ranges of the loop and thread variables of a function."""

    def __init__(self, body: Any) -> None:
        self.known = ir.sym.Analyzer()
        self.iterators: set[Any] = set()
        for loop in ir.nodes(body, ir.For):
            self._iterator(loop.loop_var, loop.min, loop.extent)
        for node in ir.nodes(body, ir.AttrStmt):
            if node.attr_key == "thread_extent":
                self._iterator(node.node.var, 0, node.value)

    def _iterator(self, var: Any, least: Any, extent: Any) -> None:
        if var not in self.iterators:
            self.iterators.add(var)
            self.known.bind(var, ir.tvm.ir.Range.from_min_extent(least, extent))


class _HidingFromMaps(_Iterators):
    def index(self, index: Any) -> Any:
        """The index, wrapped as the argument of a call if it is questionable."""
        if isinstance(index, (ir.tirx.IntImm, ir.Var)):
            return index
        divisions = ir.nodes(index, ir.tirx.FloorDiv, ir.tirx.FloorMod)
        if not any(self._is_padded(each.a) for each in divisions):
            return index
        return ir.Call(ir.Op.get(_CALL), [index], ret_ty=index.ty)

    def _is_padded(self, dividend: Any) -> bool:
        """Whether a dividend has iterators, and something beside them that is none."""
        terms = _terms(dividend)
        moving = [self._moves(each) for each in terms]
        return any(moving) and not (all(moving) and all(self._is_whole(each) for each in terms))

    def _moves(self, term: Any) -> bool:
        return any(each in self.iterators for each in ir.variables(term))

    def _is_whole(self, term: Any) -> bool:
        """Whether a term consists of iterators and constants only."""
        others = ir.nodes(term, ir.Call, ir.TensorLoad)
        return not others and all(each in self.iterators for each in ir.variables(term))


class _ShowingToAll(_Iterators):
    def index(self, index: Any) -> Any:
        """The index without the calls of `_HidingFromMaps`."""
        if isinstance(index, (ir.tirx.IntImm, ir.Var)):
            return index
        calls: list[Any] = []

        def show(node: Any, mutator: Any) -> Any:
            node = mutator.default_mutate(node)
            if not _is_hidden(node):
                return node
            calls.append(node)
            return node.args[0]

        shown = ir.mutate(index, (ir.Call, show))
        return self.known.simplify(shown) if calls else index


def _is_hidden(node: Any) -> bool:
    return bool(node.op.same_as(ir.Op.get(_CALL))) and str(node.ty) == str(node.args[0].ty)


def _terms(expression: Any) -> list[Any]:
    """Terms of a sum or difference, without zeros."""
    if isinstance(expression, (ir.tirx.Add, ir.tirx.Sub)):
        return [*_terms(expression.a), *_terms(expression.b)]
    return [] if ir.constant(expression) == 0 else [expression]


def _same(indices: list[Any], others: Any) -> bool:
    return all(one.same_as(other) for one, other in zip(indices, others, strict=True))


# Element-wise maxima and minima of floats as operators that are NaN where an operand is.
#
# Chains, cascades and models are read and rewritten with TVM's own `Max` and `Min`. Before they
# become loops or instructions, those that are no step of a reduction are replaced: see
# `crossfuse.lower.hidden`. A reduction's own stay, in words and in instructions.


_ABS = "tirx.fabs"


class Kind(IntEnum):
    """What an expression can evaluate to: a number, NaN, or what reductions yield."""

    #: A number or NaN.
    ANY = 0
    #: Never NaN, such as a constant.
    NUMBER = 1
    #: Never NaN, because it stems from a reduction by `Max` or `Min`, which drop NaN.
    EXTREME = 2


class Kinds:
    """Infers which expressions of a function may be NaN.

    A fixed point over buffers and variables: each has the kind of everything that is stored to it,
    so that one which only takes part in its own maximum is an extreme. All start as extremes, and
    lose that until nothing changes.
    """

    def __init__(self, func: Any) -> None:
        self._values: dict[Any, list[tuple[Any, Any]]] = {}
        self._shared: set[Any] = set()
        ir.walk(
            func.body,
            (ir.BufferStore, self._store),
            (ir.Bind, self._bind),
            (ir.Call, self._call),
            (ir.SBlock, self._views),
        )
        self._names = {name: Kind.EXTREME for name in self._values if name not in self._shared}
        for each in func.params:
            self._check_start(each)
        while self._step():
            pass

    def _store(self, node: Any) -> None:
        if is_float(str(node.buffer.ty.dtype)):
            self._values.setdefault(node.buffer, []).append((node.value, node.buffer))

    def _bind(self, node: Any) -> None:
        if is_float(str(node.var.ty)):
            self._values.setdefault(node.var, []).append((node.value, None))

    def _call(self, node: Any) -> None:
        """A buffer whose address is passed to a call may be written there."""
        for each in node.args:
            source = each.source if isinstance(each, ir.TensorLoad) else each
            taken = not isinstance(each, ir.TensorLoad) or node.op.name == "tirx.address_of"
            if taken and isinstance(source, ir.Var) and ir.is_buffer_var(source):
                self._shared.add(source)

    def _views(self, block: Any) -> None:
        for each in block.match_buffers:
            self._shared |= {each.buffer, each.source.source}

    def _check_start(self, parameter: Any) -> None:
        """A parameter that is not set to a number first holds whatever the caller had in it."""
        values = self._values.get(parameter, [])
        if not any(isinstance(value, ir.tirx.FloatImm) for value, _ in values):
            self._names.pop(parameter, None)

    def _step(self) -> bool:
        found = {
            name: self._joined([self.of(value, buffer) for value, buffer in self._values[name]])
            for name in self._names
        }
        changed = found != self._names
        self._names = found
        return changed

    def _joined(self, kinds: list[Kind]) -> Kind:
        return max(kinds) if min(kinds) else Kind.ANY

    def reduces(self, node: Any, buffer: Any = None) -> bool:
        """Whether a maximum or minimum of floats, stored to `buffer` if given, updates a reduction.

        True also of one that reads what a reduction found.
        """
        return self._of_extreme(node, buffer) == Kind.EXTREME

    def of(self, value: Any, buffer: Any = None) -> Kind:
        """The kind of an expression, which may be what is stored to `buffer`."""
        if not is_float(str(value.ty)):
            return Kind.NUMBER
        if isinstance(value, ir.tirx.FloatImm):
            return Kind.ANY if math.isnan(value.value) else Kind.NUMBER
        if isinstance(value, ir.TensorLoad | ir.Var):
            name = value.source if isinstance(value, ir.TensorLoad) else value
            return self._names.get(name, Kind.ANY)
        if isinstance(value, ir.tirx.Cast):
            return self.of(value.value)
        if isinstance(value, ir.tirx.Max | ir.tirx.Min):
            return self._of_extreme(value, buffer)
        return self._computed(value)

    def _of_extreme(self, node: Any, buffer: Any) -> Kind:
        sides = (node.a, node.b)
        kinds = [self.of(each) for each in sides]
        if Kind.EXTREME in kinds:
            return Kind.EXTREME
        own = any(isinstance(e, ir.TensorLoad) and e.source.same_as(buffer) for e in sides)
        if own and not any(isinstance(each, ir.tirx.FloatImm) for each in sides):
            return Kind.EXTREME
        return self._joined(kinds)

    def _computed(self, value: Any) -> Kind:
        """The kind of an expression that selects or scales."""
        if isinstance(value, ir.tirx.Select):
            return self._joined([self.of(value.true_value), self.of(value.false_value)])
        if isinstance(value, ir.tirx.Mul | ir.tirx.Div | ir.tirx.Add | ir.tirx.Sub):
            number, rest = value.b, value.a
            if isinstance(rest, ir.tirx.FloatImm) and not isinstance(value, ir.tirx.Div):
                number, rest = rest, number
            # Zero times infinity is NaN, and so is the difference of two infinities.
            plain = isinstance(number, ir.tirx.FloatImm) and math.isfinite(number.value)
            return self.of(rest) if plain and number.value != 0 else Kind.ANY
        if isinstance(value, ir.Call) and isinstance(value.op, ir.Op):
            name = str(value.op.name)
            if name == ir.IF_THEN_ELSE:
                return self._joined([self.of(value.args[1]), self.of(value.args[2])])
            if name == _ABS:
                return self.of(value.args[0])
        return Kind.ANY


# Operators of TIR for maxima and minima that are NaN where an operand is, as torch's are.
#
# TVM's own `Max` and `Min` are ``fmaxf`` and ``fminf`` in CUDA, which drop NaN, and in LLVM a
# comparison, which drops it from one side.

#: Of two float32 or float64, or of vectors of them.
MAXIMUM, MINIMUM = "tirx.crossfuse_maximum", "tirx.crossfuse_minimum"
#: Numbers at once for which there is a helper in `device/extremes.cuh`.
_LANES = (1, 2, 4)


def extreme(name: str, one: Any, other: Any) -> Any:
    """A call of `MAXIMUM` or `MINIMUM` on operands of one float type, with a result of that type.

    Types of fewer than 32 bits are compared in float32, since the operators take none of them.
    """
    dtype = ir.tvm.DataType(str(one.ty))
    if dtype.bits >= 32:
        return _call(name, one, other)
    wide = "float32" if dtype.lanes == 1 else f"float32x{dtype.lanes}"
    return ir.tirx.Cast(str(dtype), _call(name, one.astype(wide), other.astype(wide)))


def _call(name: str, one: Any, other: Any) -> Any:
    return ir.Call(ir.Op.get(name), [one, other], ret_ty=str(one.ty))


def on_cuda(call: Any) -> Any:
    """A call of `MAXIMUM` or `MINIMUM` as one of the device helper."""
    dtype = ir.tvm.DataType(str(call.ty))
    if dtype.bits != 32 or dtype.lanes not in _LANES:
        return elsewhere(call)
    name = str(call.op.name).removeprefix("tirx.")
    text = packaged_text("crossfuse.lower", "device/extremes.cuh")
    return ir.cuda_func_call(name, *call.args, source_code=text, return_type=str(call.ty))


def on_llvm(call: Any) -> Any:
    """A call of `MAXIMUM` or `MINIMUM` as one of LLVM's intrinsic."""
    name = str(call.op.name).removeprefix("tirx.crossfuse_")
    return ir.tirx.call_llvm_pure_intrin(str(call.ty), f"llvm.{name}", *call.args)


def elsewhere(call: Any) -> Any:
    """A call of `MAXIMUM` or `MINIMUM` by comparisons, which are false for NaN.

    TVM would simplify NaN away, since ``x == x`` is true to it; nothing is simplified at that
    stage.
    """
    one, other = call.args
    further = ir.tirx.LT if str(call.op.name) == MAXIMUM else ir.tirx.GT
    number = ir.tirx.Select(ir.tirx.EQ(other, other), one, other)
    return ir.tirx.Select(further(one, other), other, number)


#: Attribute of functions that are done.
KEPT = "crossfuse.keeps_nans"
_NAMES = {ir.tirx.Max: MAXIMUM, ir.tirx.Min: MINIMUM}


def keep_nans(func: Any) -> Any:
    """Have element-wise maxima and minima of a function give NaN where an operand is NaN.

    It runs before vectors are made. What only numbers go into stays, and so does what updates or
    reads the extreme of a reduction, which is a number. Without any such operator the function
    itself is returned.
    """
    if KEPT in (func.attrs or {}) or not _has_extremes(func.body):
        return func
    body = _Rewriter(Kinds(func)).rewritten(func.body)
    return ir.with_body(func, body).with_attr(KEPT, True)


def _has_extremes(body: Any) -> bool:
    return any(is_float(str(each.ty)) for each in ir.nodes(body, *_NAMES))


class _Rewriter:
    """Replaces element-wise maxima and minima of one function."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._buffer: Any = None

    def rewritten(self, body: Any) -> Any:
        return ir.mutate(
            body,
            (ir.BufferStore, self._store),
            (ir.tirx.Cast, self._cast),
            *((each, self._extreme) for each in _NAMES),
        )

    def _store(self, node: Any, mutator: Any) -> Any:
        outer, self._buffer = self._buffer, node.buffer
        node = mutator.default_mutate(node)
        self._buffer = outer
        return node

    def _cast(self, node: Any, mutator: Any) -> Any:
        # Of what becomes an integer NaN has no meaning, and places must stay in their tensor.
        return mutator.default_mutate(node) if is_float(str(node.ty)) else node

    def _extreme(self, node: Any, mutator: Any) -> Any:
        if not is_float(str(node.ty)):
            return mutator.default_mutate(node)
        kinds = self._kinds
        if kinds.reduces(node, self._buffer) or kinds.of(node) >= Kind.NUMBER:
            # What a step chooses among is the same as where else it is made, to be made once.
            return mutator.default_mutate(node)
        return extreme(_NAMES[type(node)], mutator.mutate(node.a), mutator.mutate(node.b))
