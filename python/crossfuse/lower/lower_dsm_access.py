"""The pass that turns accesses to peers' slabs into loads and stores of distributed shared memory.

It runs after loops are vectorised, so that a vectorised loop over a slab is one access of up to
16 bytes.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused, refuse
from crossfuse.lower.intrinsics import WORDS, dsm_load, dsm_store
from crossfuse.lower.lower_cluster import PEERS_SCOPE, PEERS_SUFFIX, RANK_STRIDE
from crossfuse.lower.passes import prim_func_pass


def lower_dsm_access() -> Any:
    """Pass: loads and stores through a stand-in become calls of the device helpers.

    ``P_peers[rank * stride + e]`` becomes ``crossfuse_dsm_load_b32(&P[e], rank)``: every CTA of
    the cluster has the same shared memory layout, so a slab lies at the same offset in all.

    Returns
    -------
    tvm.ir.transform.Pass
        A PrimFunc pass; a no-op without stand-ins.
    """

    def transform(func: Any) -> Any:
        buffers: dict[str, Any] = {}
        ir.walk(
            func.body,
            (ir.AllocBuffer, lambda node: buffers.setdefault(str(node.buffer.name), node.buffer)),
        )
        slabs = {
            buffer: buffers[name.removesuffix(PEERS_SUFFIX)]
            for name, buffer in buffers.items()
            if buffer.scope() == PEERS_SCOPE and name.endswith(PEERS_SUFFIX)
        }
        return ir.with_body(func, _Lowering(func.body, slabs).run()) if slabs else func

    return prim_func_pass("LowerDsmAccess", transform)


class _Lowering:
    def __init__(self, body: Any, slabs: dict[Any, Any]) -> None:
        self.body = body
        self.slabs = slabs
        self.analyzer = ir.sym.Analyzer()

    def run(self) -> Any:
        self._bind_ranges()
        return ir.mutate(
            self.body,
            (ir.TensorLoad, self._load),
            (ir.BufferStore, self._store),
            (ir.SeqStmt, self._sequence),
        )

    def _bind_ranges(self) -> None:
        whole = ir.tvm.ir.Range.from_min_extent

        def visit_loop(loop: Any) -> None:
            self.analyzer.bind(loop.loop_var, whole(loop.min, loop.extent))

        def visit_launch(node: Any) -> None:
            if node.attr_key == "thread_extent":
                self.analyzer.bind(node.node.var, whole(0, node.value))

        ir.walk(self.body, (ir.For, visit_loop), (ir.AttrStmt, visit_launch))

    def _sequence(self, sequence: Any, mutator: Any) -> Any:
        kept = [
            mutator.mutate(each)
            for each in sequence.seq
            if not (isinstance(each, ir.AllocBuffer) and each.buffer in self.slabs)
        ]
        return ir.SeqStmt(kept) if len(kept) != 1 else kept[0]

    def _load(self, load: Any, mutator: Any) -> Any:
        if load.source not in self.slabs:
            return mutator.default_mutate(load)
        slab = self.slabs[load.source]
        address, rank, lanes = self._locate(slab, mutator.mutate(load.indices[0]))
        return dsm_load(address, rank, str(slab.ty.dtype), lanes)

    def _store(self, store: Any, mutator: Any) -> Any:
        if store.buffer not in self.slabs:
            return mutator.default_mutate(store)
        slab = self.slabs[store.buffer]
        address, rank, lanes = self._locate(slab, mutator.mutate(store.indices[0]))
        return dsm_store(address, rank, mutator.mutate(store.value), str(slab.ty.dtype), lanes)

    def _locate(self, slab: Any, index: Any) -> tuple[Any, Any, int]:
        """Own address, rank and number of elements of an access through the stand-in."""
        # Vectorising leaves sums of ramps and broadcasts; simplified, a contiguous one is a ramp.
        index = self.analyzer.simplify(index)
        base, lanes = index, int(ir.tvm.DataType(str(index.ty.dtype)).lanes)
        if isinstance(index, ir.tirx.Ramp) and ir.constant(index.stride) == 1:
            base = index.base
        elif lanes > 1:
            raise self._refuse(slab, index, "an access that is not contiguous")
        stride = ir.tirx.IntImm("int32", RANK_STRIDE)
        rank = self.analyzer.simplify(ir.tirx.floordiv(base, stride))
        offset = self.analyzer.simplify(ir.tirx.floormod(base, stride))
        size = ir.tvm.DataType(str(slab.ty.dtype)).bits // 8 * lanes
        if size not in WORDS:
            raise self._refuse(slab, index, f"{lanes} elements of {size} bytes together")
        modular = self.analyzer.modular_set(offset)
        if gcd(int(modular.coeff), int(modular.base)) % lanes:
            raise self._refuse(slab, index, f"an offset {offset} that may be misaligned")
        return ir.tirx.address_of(ir.tirx.BufferLoad(slab, [offset])), rank, lanes

    def _refuse(self, slab: Any, index: Any, found: str) -> Exception:
        return refuse(
            LoweringRefused,
            "dsm-vector",
            f"buffer '{slab.name}', index {index}",
            found=found,
            limit="one aligned, contiguous access of 1, 2, 4, 8 or 16 bytes",
            instead="split the vectorised loop by 16 bytes or less, with an extent that divides "
            "the rows of the tile",
        )
