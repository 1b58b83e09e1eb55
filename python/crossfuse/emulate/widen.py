"""Functions on 8-bit floats as the same functions on float32, for the sequential check.

TVM's conversions of 8-bit floats on the CPU are wrong for zeros, denormals and infinities. Every
8-bit float is a float32, so what only copies and widens them computes the same on float32 buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossfuse import _tvm as ir

_WIDE = "float32"


def widen(func: Any) -> Any:
    """Give 8-bit floating-point buffers of a function float32 elements.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Any function.

    Returns
    -------
    tvm.tirx.PrimFunc
        The function itself if it has no such buffer, or rounds to such a type: rounding is not
        what float32 would do.
    """
    if _rounds(func.body):
        return func
    images: dict[Any, Any] = {}

    def image(buffer: Any) -> Any:
        if not is_narrow(buffer):
            return buffer
        if buffer not in images:
            kind, scope = buffer.ty, str(buffer.scope())
            images[buffer] = ir.tirx.decl_buffer(list(kind.shape), _WIDE, buffer.name, scope=scope)
        return images[buffer]

    params = [image(each) if ir.is_buffer_var(each) else each for each in func.params]
    body = retyped(func.body, image)
    if not images:
        return func
    return ir.PrimFunc(params, body, func.ret_type, func.attrs)


def is_narrow(buffer: Any) -> bool:
    """Whether a buffer has 8-bit floating-point elements."""
    return str(buffer.ty.dtype).startswith("float8")


def _rounds(body: Any) -> bool:
    """Whether anything is converted to an 8-bit float, or is one without being loaded."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if str(node.ty).startswith("float8"):
            found.append(node)

    ir.walk(body, (ir.tirx.Cast, visit), (ir.Call, visit), (ir.tirx.FloatImm, visit))
    return bool(found)


def retyped(
    body: Any,
    image: Callable[[Any], Any],
    type_of: Callable[[str], str] = str,
    callbacks: Sequence[tuple[type, Any]] = (),
) -> Any:
    """Give buffers of a statement other types.

    Parameters
    ----------
    body : tvm.tirx.Stmt
        The statement.
    image : Callable
        The buffer in whose place another one comes, or the buffer itself.
    type_of : Callable
        What becomes of a type that is converted to.
    callbacks : Sequence
        What becomes of other nodes, see `crossfuse._tvm.mutate`.
    """

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return ir.tirx.BufferLoad(image(node.source), list(node.indices))

    def store(node: Any, mutator: Any) -> Any:
        value = mutator.mutate(node.value)
        indices = [mutator.mutate(each) for each in node.indices]
        return ir.BufferStore(image(node.buffer), value, indices)

    def cast(node: Any, mutator: Any) -> Any:
        value, wanted = mutator.mutate(node.value), type_of(str(node.ty))
        return value if str(value.ty) == wanted else ir.tirx.Cast(wanted, value)

    def block(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        reads, writes = (
            [ir.tirx.BufferRegion(image(each.source), each.region) for each in regions]
            for regions in (node.reads, node.writes)
        )
        allocated = [image(each) for each in node.alloc_buffers]
        return ir.block_like(node, reads=reads, writes=writes, alloc_buffers=allocated)

    return ir.mutate(
        body,
        (ir.TensorLoad, load),
        (ir.BufferStore, store),
        (ir.tirx.Cast, cast),
        (ir.SBlock, block),
        *callbacks,
    )
