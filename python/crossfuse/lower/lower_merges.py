"""The pass that turns merges of states over threads into shuffles.

TVM's own reductions over threads store the numbers of a tuple one after the other, each over what
the others are computed from (TVM 0.27, ``LowerThreadAllreduce``): a sum that is corrected by an old
and a new maximum sees the new one twice. So blocks that merge tuples have a lowering of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.refusal import refuse
from crossfuse.markers import MERGE, MERGE_EQUAL, MERGED, marked_blocks_in, thread_tag


@dataclass(frozen=True, eq=False)
class MergeBlock:
    """A block that merges two states: its body binds the right one, computes, and stores."""

    #: The block with the values of its iterators.
    realize: Any
    #: The iterator that is reduced.
    reduced: Any
    #: Loads of the right state, number by number.
    of: tuple[Any, ...]
    #: Variables that the loads are bound to.
    right: tuple[Any, ...]
    #: What else is bound, or stored to buffers of the block itself, in order.
    computed: tuple[Any, ...]
    #: Stores of the merged state; loads from their buffers are the left state.
    into: tuple[Any, ...]
    #: For each number its value in all states that are merged, or 0; see `MERGE_EQUAL`.
    equal: tuple[int, ...] = ()

    @property
    def block(self) -> Any:
        """The block without the values of its iterators."""
        return self.realize.block


def read_merge(realize: Any) -> MergeBlock:
    """Read a block that `crossfuse.cascade.rewrite.phases.merge` wrote; refuse another form."""
    block = realize.block
    body = list(block.body.seq) if isinstance(block.body, ir.SeqStmt) else [block.body]
    stores = [
        each
        for each in body
        if isinstance(each, ir.BufferStore) and each.buffer not in block.alloc_buffers
    ]
    right, computed = body[: len(stores)], body[len(stores) : len(body) - len(stores)]
    reduced = [each for each in block.iter_vars if int(each.iter_type) == ir.IterVar.CommReduce]
    ordered = len(body) >= 2 * len(stores) > 0 and all(
        one.same_as(other) for one, other in zip(body[-len(stores) :], stores, strict=True)
    )
    ordered = ordered and all(isinstance(each, ir.Bind) and _is_load(each.value) for each in right)
    ordered = ordered and all(isinstance(each, ir.Bind | ir.BufferStore) for each in computed)
    if len(reduced) != 1 or not ordered:
        raise refuse(
            "merge",
            f"block '{block.name_hint}'",
            found=f"{len(body)} statements, {len(stores)} stores among them, and {len(reduced)} "
            "reduced iterators",
            limit="bindings of as many loads as there are stores, bindings and stores to buffers "
            "of the block, then the stores; one iterator that is reduced",
            instead="leave the block as the rewriting made it",
        )
    return MergeBlock(
        realize,
        reduced[0],
        tuple(each.value for each in right),
        tuple(each.var for each in right),
        tuple(computed),
        tuple(stores),
        tuple(map(int, block.annotations.get(MERGE_EQUAL, [0] * len(stores)))),
    )


def _is_load(value: Any) -> bool:
    return isinstance(value, ir.TensorLoad)


def is_largest(merge: MergeBlock) -> bool:
    """Whether a block computes the maximum of float32 numbers and zero."""
    if len(merge.into) != 1 or len(merge.computed) != 1 or str(merge.of[0].ty) != "float32":
        return False
    (store,), (made,) = merge.into, merge.computed
    init = merge.block.init
    zero = isinstance(init, ir.BufferStore) and isinstance(init.value, ir.tirx.FloatImm)
    if not zero or float(init.value.value) != 0 or not isinstance(made, ir.Bind):
        return False
    if not isinstance(made.value, ir.tirx.Max) or not store.value.same_as(made.var):
        return False
    sides = (made.value.a, made.value.b)
    own = any(isinstance(e, ir.TensorLoad) and e.source.same_as(store.buffer) for e in sides)
    return own and any(each.same_as(merge.right[0]) for each in sides)


_SHUFFLE = "tirx.tvm_warp_shuffle_xor"


def lower_merges() -> Any:
    """Pass: blocks marked `MERGE` whose loop threads share become shuffles.

    Threads exchange states in pairs, at distances 1, 2, 4, 8 and 16; warps through shared memory.
    Numbers that are the same in all states (`MERGE_EQUAL`) are known, and not exchanged. Of a pair
    the thread with the lower number is the left one, so that both compute the same, and states
    merge in the order of threads::

        for thread in threadIdx.x:
            own = SEGMENT[thread]
            for distance in 1, 2, 4, 8, 16:
                other = own of thread ^ distance
                own = merge(own, other) if thread & distance == 0 else merge(other, own)
            WARPS[thread // 32] = own                   # the first thread of each warp
            own = WARPS[thread % warps], and again among warps
            RESULT = own                                # each thread has its own copy

    A loop around the block alone that is not bound to threads, but stands in one that is, is shared
    by the lanes of each warp: ``own = SEGMENT[thread % extent]``, then pairs as above. So all
    threads end with what each of them would have computed by itself.
    """

    def transform(func: Any) -> Any:
        loops: list[Any] = []

        def lower(loop: Any, mutator: Any) -> Any:
            realize = loop.body
            if not isinstance(realize, ir.SBlockRealize) or MERGE not in realize.block.annotations:
                loops.append(loop)
                loop = mutator.default_mutate(loop)
                loops.pop()
                return loop
            if thread_tag(loop) == "threadIdx.x":
                return _Lowering(read_merge(realize), loop, _bound(loops, "threadIdx.y")).run()
            threads = _bound(loops, "threadIdx.x")
            if thread_tag(loop) or threads is None:
                raise _refuse(realize.block, "a loop that is not bound to threadIdx.x")
            return _OfLanes(read_merge(realize), loop, threads).run()

        body = ir.mutate(func.body, (ir.For, lower))
        _check_none_left(body)
        return func if body.same_as(func.body) else ir.with_body(func, body)

    return ir.prim_func_pass("LowerMerges", transform)


def _bound(loops: list[Any], tag: str) -> Any:
    """The enclosing loop that is bound to a coordinate of threads, or None."""
    return next((each for each in loops if thread_tag(each) == tag), None)


class _Lowering:
    """Emits the statements of one merge."""

    def __init__(self, merge: MergeBlock, loop: Any, group: Any) -> None:
        self.merge = merge
        self.loop = loop
        self.threads = _size(merge.block, loop)
        self.groups = 1 if group is None else _size(merge.block, group)
        self.group = group
        self.thread = ir.Var(merge.reduced.var.name, str(merge.reduced.var.ty))
        self.row = ir.Var("group_", str(merge.reduced.var.ty))
        self.equal: list[Any] = []
        count = len(merge.into)
        self.own = [self._register("own", i) for i in range(count)]
        self.left = [self._register("left", i) for i in range(count)]
        self.right = [self._register("right", i) for i in range(count)]
        self.values = {
            each.var: self._value(each) for each in merge.computed if isinstance(each, ir.Bind)
        }
        self.warps = self.threads // WARP
        self.staged = [self._staging(i) for i in range(count)] if self.warps > 1 else []

    def run(self) -> Any:
        body = [
            ir.BufferStore(o, of, [_ZERO]) for o, of in zip(self.own, self.merge.of, strict=True)
        ]
        body += self._largest() or self._among(min(self.threads, WARP))
        if self.warps > 1:
            body += [*self._exchange(), *self._among(self.warps, WARP)]
        body += self._store()
        statement = ir.substitute(ir.SeqStmt(body), {self.merge.reduced.var: self.thread})
        return ir.for_like(self.loop, self._block(statement))

    def _block(self, body: Any) -> Any:
        old = self.merge.block
        iters = [each for each in old.iter_vars if not each.same_as(self.merge.reduced)]
        values = [
            value
            for each, value in zip(old.iter_vars, self.merge.realize.iter_values, strict=True)
            if not each.same_as(self.merge.reduced)
        ]
        iters.append(_spatial(self.thread, self.threads))
        values.append(self.loop.loop_var)
        if self.group is not None:
            iters.append(_spatial(self.row, self.groups))
            values.append(self.group.loop_var)
        renamed = {self.merge.reduced.var: self.thread}
        reads = [ir.substitute(_at(each), renamed) for each in self.merge.of]
        return self._realized(iters, values, reads, body)

    def _realized(self, iters: list[Any], values: list[Any], reads: list[Any], body: Any) -> Any:
        """The block with another body, which works on registers of its own."""
        old = self.merge.block
        registers = [*self.own, *self.left, *self.right, *self.values.values()]
        block = ir.SBlock(
            iters,
            reads,
            list(old.writes),
            old.name_hint,
            body,
            None,
            [*old.alloc_buffers, *registers, *self.staged],
            [],
            {MERGED: 1},
        )
        return ir.SBlockRealize(values, self.merge.realize.predicate, block)

    def _register(self, name: str, number: int) -> Any:
        buffer = self.merge.into[number].buffer
        return ir.tirx.decl_buffer(
            [1], str(buffer.ty.dtype), f"{buffer.name}_{name}", scope="local"
        )

    def _value(self, bind: Any) -> Any:
        return ir.tirx.decl_buffer([1], str(bind.var.ty), f"{bind.var.name}_", scope="local")

    def _staging(self, number: int) -> Any:
        buffer = self.merge.into[number].buffer
        shape = [self.groups, self.warps]
        name = f"{buffer.name}_warps"
        return ir.tirx.decl_buffer(shape, str(buffer.ty.dtype), name, scope="shared")

    def _largest(self) -> list[Any]:
        """Statements for the maximum of a warp by one instruction; none if the merge is no maximum.

        Numbers that are not negative sort as their bits do, and ``redux.sync`` finds the largest
        unsigned integer of a warp (PTX ISA).
        """
        if self.threads != WARP or self.groups > 1 or not is_largest(self.merge):
            return []
        (own,) = self.own
        largest = ir.cuda_func_call(
            "crossfuse_warp_largest", own[0], source_code=_LARGEST, return_type="float32"
        )
        return [ir.BufferStore(own, largest, [_ZERO])]

    def _among(self, count: int, merged: int = 1) -> list[Any]:
        """Statements: merge states of `count` neighbours, each of `merged` states, in pairs."""
        statements: list[Any] = []
        distance = 1
        while distance < count:
            statements += self._pair(distance, merged * distance)
            distance *= 2
        return statements

    def _pair(self, distance: int, merged: int) -> list[Any]:
        lanes = min(WARP, self.threads * self.groups)
        mask = ir.tirx.const((1 << lanes) - 1, "uint32")
        lower = ir.tirx.EQ(ir.tirx.bitwise_and(self.thread, distance), 0)
        statements: list[Any] = []
        self.equal = [
            ir.tirx.const(each * merged, str(own.ty.dtype)) if each else None
            for each, own in zip(self.merge.equal, self.own, strict=True)
        ]
        for own, left, right, equal in zip(
            self.own, self.left, self.right, self.equal, strict=True
        ):
            if equal is not None:
                continue
            other = ir.tirx.call_intrin(
                str(own.ty.dtype), _SHUFFLE, mask, own[0], distance, WARP, WARP
            )
            statements += [
                ir.BufferStore(right, other, [_ZERO]),
                ir.BufferStore(left, ir.tirx.Select(lower, own[0], right[0]), [_ZERO]),
                ir.BufferStore(right, ir.tirx.Select(lower, right[0], own[0]), [_ZERO]),
            ]
        known = {var: buffer[0] for var, buffer in self.values.items()}
        for var, right, equal in zip(self.merge.right, self.right, self.equal, strict=True):
            known[var] = right[0] if equal is None else equal
        for each in self.merge.computed:
            value = self._written(each.value, known)
            if isinstance(each, ir.Bind):
                statements.append(ir.BufferStore(self.values[each.var], value, [_ZERO]))
            else:
                statements.append(ir.BufferStore(each.buffer, value, list(each.indices)))
        for own, store in zip(self.own, self.merge.into, strict=True):
            statements.append(ir.BufferStore(own, self._written(store.value, known), [_ZERO]))
        return statements

    def _written(self, expression: Any, known: dict[Any, Any]) -> Any:
        """An expression of the merge, over the registers of a pair."""

        def load(node: Any, mutator: Any) -> Any:
            for store, left, equal in zip(self.merge.into, self.left, self.equal, strict=True):
                if node.source.same_as(store.buffer):
                    return left[0] if equal is None else equal
            return mutator.default_mutate(node)

        expression = ir.mutate(expression, (ir.TensorLoad, load))
        return ir.substitute(expression, known)

    def _exchange(self) -> list[Any]:
        """Statements: pass each warp's state to all warps."""
        row = self.row if self.group is not None else _ZERO
        first = ir.tirx.EQ(ir.tirx.floormod(self.thread, WARP), 0)
        warp = ir.tirx.floordiv(self.thread, WARP)
        stores = [
            ir.BufferStore(staged, own[0], [row, warp])
            for own, staged in zip(self.own, self.staged, strict=True)
        ]
        lane = ir.tirx.floormod(self.thread, self.warps)
        loads = [
            ir.BufferStore(own, staged[row, lane], [_ZERO])
            for own, staged in zip(self.own, self.staged, strict=True)
        ]
        stored = ir.SeqStmt(stores) if len(stores) > 1 else stores[0]
        return [ir.IfThenElse(first, stored, None), *loads]

    def _store(self) -> list[Any]:
        """Statements: store the result, by all threads into registers, by one into memory."""
        statements: list[Any] = []
        for own, store in zip(self.own, self.merge.into, strict=True):
            result = ir.BufferStore(store.buffer, own[0], list(store.indices))
            if str(store.buffer.scope()) != "local":
                result = ir.IfThenElse(ir.tirx.EQ(self.thread, 0), result, None)
            statements.append(result)
        return statements


class _OfLanes(_Lowering):
    """Emits a merge whose loop the lanes of each warp share."""

    def __init__(self, merge: MergeBlock, loop: Any, threads: Any) -> None:
        super().__init__(merge, loop, None)
        block, count = merge.block, self.threads
        self.shared, self.threads = count, _size(block, threads)
        if count > min(self.threads, WARP):
            raise _refuse(block, f"{count} states for warps of {min(self.threads, WARP)} threads")
        found = zip(block.iter_vars, merge.realize.iter_values, strict=True)
        ours = [each.var for each, value in found if value.same_as(threads.loop_var)]
        if len(ours) != 1:
            raise _refuse(block, f"no iterator that is loop '{threads.loop_var.name}'")
        self.thread = ours[0]
        self.staged = []

    def run(self) -> Any:
        lane = {self.merge.reduced.var: ir.tirx.floormod(self.thread, self.shared)}
        body = [
            ir.BufferStore(o, ir.substitute(each, lane), [_ZERO])
            for o, each in zip(self.own, self.merge.of, strict=True)
        ]
        body += [*self._among(self.shared), *self._store()]
        old = self.merge.block
        kept = [
            (each, value)
            for each, value in zip(old.iter_vars, self.merge.realize.iter_values, strict=True)
            if not each.same_as(self.merge.reduced)
        ]
        iters, values = [each for each, _ in kept], [value for _, value in kept]
        reads = [self._every(each) for each in old.reads]
        return self._realized(iters, values, reads, ir.SeqStmt(body))

    def _every(self, region: Any) -> Any:
        """The region that all iterations of the loop read together."""
        whole, reduced = ir.tvm.ir.Range.from_min_extent, self.merge.reduced.var
        ranges = [
            whole(0, extent) if ir.mentions(each.min, reduced) else each
            for each, extent in zip(region.region, region.source.ty.shape, strict=True)
        ]
        return ir.tirx.BufferRegion(region.source, ranges)


_ZERO = ir.tirx.IntImm("int32", 0)
_LARGEST = """\
__device__ __forceinline__ float crossfuse_warp_largest(float x) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(fmaxf(x, 0.0f))));
}
"""


def _spatial(variable: Any, extent: int) -> Any:
    bounds = ir.tvm.ir.Range.from_min_extent(0, extent)
    return ir.IterVar(bounds, variable, ir.IterVar.DataPar)


def _at(load: Any) -> Any:
    """The region of one element."""
    one = [ir.tvm.ir.Range.from_min_extent(each, 1) for each in load.indices]
    return ir.tirx.BufferRegion(load.source, one)


def _size(block: Any, loop: Any) -> int:
    extent = ir.constant(loop.extent) or 0
    if extent < 1 or extent & (extent - 1):
        raise _refuse(block, f"{loop.extent} threads along {thread_tag(loop)}")
    return extent


def _check_none_left(body: Any) -> None:
    for block in marked_blocks_in(body, MERGE):
        raise _refuse(block, "a block in a loop with other statements")


def _refuse(block: Any, found: str) -> Exception:
    return refuse(
        "merge",
        f"block '{block.name_hint}'",
        found=found,
        limit="one loop around the block, bound to a power of two of threads along x",
        instead="bind the whole reduction loop of the block to threadIdx.x",
    )
