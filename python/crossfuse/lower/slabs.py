"""The buffers that replace a `shared.dsm` buffer while a kernel is lowered."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.access import row_major
from crossfuse.lower.passes import prim_func_pass, unused, was_lowered
from crossfuse.markers import DSM_SCOPE

#: Scope of the stand-in through which peers' slabs are addressed until loops are vectorised.
PEERS_SCOPE = "shared.dsm"
#: Elements between the slabs of two ranks in a stand-in: larger than any slab, a power of two, so
#: that rank and offset are told apart again after flattening and vectorising.
RANK_STRIDE = 1 << 22
#: What the name of a stand-in adds to that of the slab, and of one to which words are pushed.
PEERS_SUFFIX, PUSHED_SUFFIX = "_peers", "_pushed"
_SUFFIXES = ("", PEERS_SUFFIX, PUSHED_SUFFIX)


class Slabs:
    """The CTA's own slab, and the stand-in for its peers' slabs, of each DSM buffer of a function.

    The own slab has the shape without the rank. The stand-in is addressed by (rank in the cluster,
    row-major element); it has no memory, and `lower_dsm_access` removes it. The two are matched by
    their names, which are unique in the function.
    """

    def __init__(self, func: Any) -> None:
        blocks = ir.nodes(func.body, ir.SBlock)
        buffers = [*func.params, *(buffer for each in blocks for buffer in each.alloc_buffers)]
        mine = dict.fromkeys(each for each in buffers if _is_slab(each))
        taken = {str(each.name) for each in buffers if each not in mine}
        self._images: dict[Any, tuple[Any, Any]] = {}
        for buffer in mine:
            name = unused(str(buffer.name), taken, _SUFFIXES)
            taken |= {name + each for each in _SUFFIXES}
            self._images[buffer] = (_own_slab(buffer, name), _stand_in(buffer, name, PEERS_SUFFIX))

    def push(self, buffer: Any) -> None:
        """Have stores to peers' slabs of a buffer pushed, see `crossfuse.lower.push`."""
        own, _ = self._images[buffer]
        self._images[buffer] = (own, _stand_in(buffer, str(own.name), PUSHED_SUFFIX))

    def images(self, buffer: Any) -> list[Any]:
        """The buffers to allocate instead of a DSM buffer."""
        return list(self._images[buffer])

    def own_element(self, buffer: Any, place: list[Any]) -> tuple[Any, list[Any]]:
        """Buffer and indices of an element of the CTA's own slab."""
        return self._images[buffer][0], place or [_zero()]

    def peer_element(self, buffer: Any, rank: Any, place: list[Any]) -> tuple[Any, list[Any]]:
        """Stand-in and indices of an element of the slab of `rank`, counted in the cluster."""
        return self._images[buffer][1], [rank, row_major(place, list(buffer.ty.shape)[1:])]

    def regions(self, region: Any) -> list[Any]:
        """The regions that replace a region of a DSM buffer, and contain it."""
        whole = ir.tvm.ir.Range.from_min_extent
        return [
            ir.tirx.BufferRegion(image, [whole(0, extent) for extent in image.ty.shape])
            for image in self._images[region.source]
        ]


def _is_slab(variable: Any) -> bool:
    return ir.is_buffer_var(variable) and variable.scope() == DSM_SCOPE


def _own_slab(buffer: Any, name: str) -> Any:
    shape = list(buffer.ty.shape)[1:] or [1]
    return ir.tirx.decl_buffer(
        shape, buffer.ty.dtype, name, scope="shared.dyn", data_alignment=16, layout=None
    )


def _stand_in(buffer: Any, name: str, suffix: str) -> Any:
    shape = [buffer.ty.shape[0], RANK_STRIDE]
    return ir.tirx.decl_buffer(
        shape, buffer.ty.dtype, name + suffix, scope=PEERS_SCOPE, layout=None
    )


def _zero() -> Any:
    return ir.tirx.IntImm("int32", 0)


def storage_rewrite_elsewhere() -> Any:
    """Pass: TVM's ``StorageRewrite`` on every function but cluster kernels.

    It gives the memory of a dead shared buffer to the next one. A slab is not dead while peers may
    read it, and the rewrite adds no synchronisation; `place_shared_memory` shares memory where that
    is safe.
    """
    rewrite = ir.tirx.transform.StorageRewrite()

    def transform(func: Any) -> Any:
        if was_lowered(func):
            return func
        (rewritten,) = rewrite(ir.IRModule({"main": func})).functions.values()
        return rewritten

    return prim_func_pass("StorageRewriteElsewhere", transform)
