"""The pass that turns accesses to peers' slabs into loads and stores of distributed shared memory.

It runs after loops are vectorised, so that a vectorised loop over a slab is one access of up to
16 bytes.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.intrinsics import WORDS, dsm_load, dsm_store
from crossfuse.lower.passes import LOWERED, body_pass
from crossfuse.lower.push import ARRIVED, barrier_pointer, push_word, take_word
from crossfuse.lower.refusal import refuse
from crossfuse.lower.slabs import PEERS_SCOPE, PEERS_SUFFIX, PUSHED_SUFFIX, RANK_STRIDE


def lower_dsm_access() -> Any:
    """Pass: loads and stores through a stand-in become calls of the device helpers.

    ``P_peers[rank * stride + e]`` becomes ``crossfuse_dsm_load_b32(&P[e], rank)``: every CTA of the
    cluster has the same shared memory layout, so a slab lies at the same offset in all.
    """
    return body_pass("LowerDsmAccess", LOWERED, lambda body: _Lowering().run(body))


class _Lowering:
    """Rewrites a body in program order, so that allocations are seen before their uses."""

    def __init__(self) -> None:
        self.allocated: dict[str, Any] = {}
        self.slabs: dict[Any, Any] = {}
        self.counters: dict[Any, Any] = {}
        self.ranges: list[tuple[Any, Any]] = []

    def run(self, body: Any) -> Any:
        return ir.mutate(
            body,
            (ir.TensorLoad, self._load),
            (ir.BufferStore, self._store),
            (ir.SeqStmt, self._sequence),
            (ir.For, self._loop),
            (ir.AttrStmt, self._launch),
        )

    def _loop(self, loop: Any, mutator: Any) -> Any:
        return self._inside(loop, loop.loop_var, loop.min, loop.extent, mutator)

    def _launch(self, node: Any, mutator: Any) -> Any:
        if str(node.attr_key) != "thread_extent":
            return mutator.default_mutate(node)
        return self._inside(node, node.node.var, 0, node.value, mutator)

    def _inside(self, node: Any, variable: Any, start: Any, extent: Any, mutator: Any) -> Any:
        """A loop or a launch, its body mutated where the range of its variable is known."""
        values = ir.tvm.ir.Range.from_min_extent(start, extent)
        self.ranges.append((variable, values))
        mutated = mutator.default_mutate(node)
        self.ranges.pop()
        return mutated

    def _sequence(self, sequence: Any, mutator: Any) -> Any:
        kept: list[Any] = []
        for each in sequence.seq:
            if isinstance(each, ir.AllocBuffer):
                name = str(each.buffer.name)
                if str(each.buffer.scope()) == PEERS_SCOPE:
                    suffix = next(s for s in (PEERS_SUFFIX, PUSHED_SUFFIX) if name.endswith(s))
                    self.slabs[each.buffer] = self.allocated[name.removesuffix(suffix)]
                    if suffix == PUSHED_SUFFIX:
                        self.counters[each.buffer] = self.allocated[ARRIVED]
                    continue
                self.allocated[name] = each.buffer
            kept.append(mutator.mutate(each))
        return ir.SeqStmt(kept) if len(kept) != 1 else kept[0]

    def _load(self, load: Any, mutator: Any) -> Any:
        if load.source not in self.slabs:
            return mutator.default_mutate(load)
        slab = self.slabs[load.source]
        address, rank, lanes = self._locate(slab, mutator.mutate(load.indices[0]))
        if load.source in self.counters:
            return take_word(address, str(slab.ty.dtype))
        return dsm_load(address, rank, str(slab.ty.dtype), lanes)

    def _store(self, store: Any, mutator: Any) -> Any:
        if store.buffer not in self.slabs:
            return mutator.default_mutate(store)
        slab = self.slabs[store.buffer]
        address, rank, lanes = self._locate(slab, mutator.mutate(store.indices[0]))
        if store.buffer in self.counters:
            counter = barrier_pointer(self.counters[store.buffer])
            return push_word(address, rank, mutator.mutate(store.value), counter)
        return dsm_store(address, rank, mutator.mutate(store.value), str(slab.ty.dtype), lanes)

    def _locate(self, slab: Any, index: Any) -> tuple[Any, Any, int]:
        """Own address, rank and number of elements of an access through the stand-in."""
        known = ir.sym.Analyzer()
        for variable, values in self.ranges:
            known.bind(variable, values)
        # Vectorising leaves sums of ramps and broadcasts; simplified, a contiguous one is a ramp.
        index = known.simplify(index)
        base, lanes = index, 1
        if isinstance(index, ir.tirx.Ramp) and ir.constant(index.stride) == 1:
            base, lanes = index.base, int(index.lanes)
        elif ir.tvm.DataType(str(index.ty)).lanes != 1:
            raise _refuse(slab, f"an access that is not contiguous: {_in_slab(index, known)}")
        stride = ir.tirx.const(RANK_STRIDE, str(base.ty))
        rank = known.simplify(ir.tirx.floordiv(base, stride))
        offset = known.simplify(ir.tirx.floormod(base, stride))
        size = ir.tvm.DataType(str(slab.ty.dtype)).bits // 8 * lanes
        if size not in WORDS:
            raise _refuse(slab, f"{lanes} elements of {size} bytes together, from {offset}")
        modular = known.modular_set(offset)
        if gcd(int(modular.coeff), int(modular.base)) % lanes:
            raise _refuse(
                slab, f"{lanes} elements together, from {offset}, which may be misaligned"
            )
        return ir.tirx.address_of(ir.tirx.BufferLoad(slab, [offset])), rank, lanes


def _in_slab(index: Any, known: Any) -> str:
    """Text for an error: which elements of a slab a vector touches, without the rank."""
    if not isinstance(index, ir.tirx.Ramp):
        return str(index)
    stride = ir.tirx.const(RANK_STRIDE, str(index.base.ty))
    start = known.simplify(ir.tirx.floormod(index.base, stride))
    return f"{index.lanes} elements from {start} in steps of {index.stride}"


def _refuse(slab: Any, found: str) -> Exception:
    return refuse(
        "dsm-vector",
        f"buffer '{slab.name}'",
        found=found,
        limit="one aligned, contiguous access of 1, 2, 4, 8 or 16 bytes",
        instead="split the vectorised loop by 16 bytes or less, with an extent that divides "
        "the rows of the tile",
    )
