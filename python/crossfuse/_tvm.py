"""Every TVM name that schedules and lowering touch, in one place.

An upgrade of TVM is an edit of this file. It imports TVM, so only modules that cannot do without
a compiler import it; `crossfuse` itself does not.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, sym, tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.backend.cuda.tile_primitive.tma_utils import mma_shared_layout
from tvm.ir import Call, IRModule, Op, TensorLoad, Var
from tvm.s_tir import SBlock, SBlockRealize, Schedule
from tvm.s_tir.schedule import ExprRV, Instruction, LoopRV, SBlockRV, ScheduleError
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as script
from tvm.tirx import (
    AllocBuffer,
    AttrStmt,
    Bind,
    BufferStore,
    DeclBuffer,
    Evaluate,
    For,
    ForKind,
    IfThenElse,
    IterVar,
    PrimFunc,
    SeqStmt,
)
from tvm.tirx.buffer import is_buffer_var
from tvm.tirx.layout import Axis as layout_axes
from tvm.tirx.layout import S as _shard
from tvm.tirx.layout import TileLayout
from tvm_ffi import _ffi_api as _calls

from crossfuse.schema import Damaged, parse

#: Name of the operator that chooses between two expressions.
IF_THEN_ELSE = "prim.if_then_else"

__all__ = [
    "IF_THEN_ELSE",
    "AllocBuffer",
    "AttrStmt",
    "Bind",
    "BufferStore",
    "Call",
    "DeclBuffer",
    "Evaluate",
    "ExprRV",
    "For",
    "ForKind",
    "IRBuilder",
    "IRModule",
    "IfThenElse",
    "Instruction",
    "IterVar",
    "LoopRV",
    "Op",
    "PrimFunc",
    "SBlock",
    "SBlockRV",
    "SBlockRealize",
    "Schedule",
    "ScheduleError",
    "SeqStmt",
    "TensorLoad",
    "Var",
    "cuda_func_call",
    "is_buffer_var",
    "layout_axes",
    "mma_shared_layout",
    "s_tir",
    "script",
    "sym",
    "tirx",
    "tvm",
    "tvm_ffi",
]


def load_json(text: str, kinds: Any) -> Any:
    """Read a node of one of `kinds` from text of ``tvm.ir.save_json``; `Damaged` if it is none."""
    parse(text, finite=False)  # within limits: TVM's own reader has none
    try:
        found = tvm.ir.load_json(text)
    except Exception as error:  # TVM raises what the broken part happens to raise
        raise Damaged(str(error).strip().splitlines()[-1], "JSON of TVM's own") from None
    if not isinstance(found, kinds):
        raise Damaged(f"a {type(found).__name__}", "a function or module")
    return found


def tile_layout(extents: tuple[int, ...], strides: tuple[Any, ...]) -> TileLayout:
    """A layout of a tile, outermost dimension first; strides on axes of threads, or plain."""
    return TileLayout(_shard[extents:strides])


def same_layout(one: Any, other: Any) -> bool:
    """Whether two layouts put every element at the same place."""
    return bool(tvm_ffi.structural_equal(one.canonicalize(), other.canonicalize()))


def alike(one: Any, other: Any) -> bool:
    """Whether two nodes are the same but for the variables that they define."""
    return bool(tvm_ffi.structural_equal(one, other))


# What `tvm_ffi.structural_walk`, `structural_map` and `structural_mutate` call. They look up types
# and signatures of callbacks each time, which took longer than most walks: those of an index.
_POSTORDER = int(tvm_ffi.WalkOrder.POSTORDER)


@functools.cache
def _indices(kinds: Any) -> tuple[int, ...]:
    """Numbers of a type of nodes, or of each of a tuple of types."""
    each = kinds if isinstance(kinds, tuple) else (kinds,)
    return tuple(tvm_ffi.core.TypeSchema.from_annotation(kind).origin_type_index for kind in each)


def walk(node: Any, *callbacks: tuple[Any, Callable[[Any], Any]]) -> None:
    """Visit every node below `node`; each callback sees the nodes of its type, or types."""
    for node_type, callback in callbacks:

        def visit(found: Any, callback: Callable[[Any], Any] = callback) -> None:
            callback(found)  # its result, if any, would steer the walk

        entries = [(index, visit) for index in _indices(node_type)]
        _calls.StructuralWalk(node, entries, (), _POSTORDER)


def nodes(node: Any, *kinds: Any) -> list[Any]:
    """All nodes of some types below `node`, each behind what is inside of it."""
    found: list[Any] = []
    walk(node, (kinds, found.append))
    return found


def sequence(node: Any) -> list[Any]:
    """Statements one behind the other, sequences opened."""
    if not isinstance(node, SeqStmt):
        return [node]
    return [each for part in node.seq for each in sequence(part)]


def buffer_loads(*expressions: Any) -> list[Any]:
    """Loads of buffers in expressions."""
    loads = (load for each in expressions for load in nodes(each, TensorLoad))
    return [each for each in loads if is_buffer_var(each.source)]


def item_bytes(dtype: Any) -> int:
    """Bytes of an element in memory."""
    return -(-int(tvm.DataType(str(dtype)).bits) // 8)


def element_count(buffer: Any) -> int:
    """Elements of a buffer of constant shape."""
    return prod(map(int, buffer.ty.shape))


def is_global(buffer: Any) -> bool:
    """Whether a buffer is in global memory."""
    return str(buffer.scope()) == "global"


def global_loads(node: Any) -> list[Any]:
    """Loads of buffers in global memory."""
    return [each for each in nodes(node, TensorLoad) if is_global(each.source)]


def buffer_stores(node: Any) -> list[Any]:
    """Stores to buffers in statements."""
    return nodes(node, BufferStore)


def substitute(node: Any, images: Mapping[Any, Any] | Callable[[Any], Any]) -> Any:
    """Replace variables (buffers too) below `node`.

    `images` has those that change, or is a function that gives a variable's image, or itself.
    """
    replace = images if callable(images) else lambda var: images.get(var, var)
    return _calls.StructuralMap(node, [(_indices(Var)[0], replace)], (), _POSTORDER)


def mutate(node: Any, *callbacks: tuple[Any, Callable[[Any, Any], Any]]) -> Any:
    """Rewrite nodes by type; a callback gets (node, mutator) and decides whether to descend."""
    entries = [(index, each, False) for kind, each in callbacks for index in _indices(kind)]
    return _calls.StructuralMutate(node, entries)


def variables(node: Any) -> Iterator[Any]:
    """All variables that occur below `node`."""
    # Most extents are numbers, and most indices variables of loops; a walk takes 50 us.
    if isinstance(node, tirx.IntImm):
        return iter(())
    if isinstance(node, Var) and not is_buffer_var(node):
        return iter((node,))
    return iter(nodes(node, Var))


def among(node: Any, group: Iterable[Any]) -> bool:
    """Whether a node is one of a group: itself, not one like it."""
    return any(node.same_as(each) for each in group)


def are_same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether two groups have the same nodes in the same order."""
    ones, others = list(one), list(other)
    return len(ones) == len(others) and all(map(tvm_ffi.Object.same_as, ones, others))


def at_zero(expression: Any, *variables: Any) -> Any:
    """An expression where variables are 0."""
    return substitute(expression, {each: tirx.IntImm(str(each.ty), 0) for each in variables})


def ranged(*domains: tuple[Any, int, int]) -> Any:
    """An analyzer that knows variables, each with its first value and number of values."""
    known = sym.Analyzer()
    for variable, first, count in domains:
        both = (tirx.IntImm(str(variable.ty), each) for each in (first, count))
        known.bind(variable, tvm.ir.Range.from_min_extent(*both))
    return known


def mentions(node: Any, variable: Any) -> bool:
    """Whether a variable, or a buffer, occurs below `node`."""
    return any(each.same_as(variable) for each in variables(node))


def with_body(func: PrimFunc, body: Any) -> PrimFunc:
    """Return `func` with another body and everything else as it was."""
    return func.with_body(body)


def narrow(func: PrimFunc) -> PrimFunc:
    """A function that counts in 32 bits, as kernels do; as it is if it holds larger numbers."""
    module = IRModule({"main": func})
    try:
        return tirx.transform.ForceNarrowIndexToInt32()(module)["main"]
    except tvm.error.InternalError:
        return func


def for_like(loop: For, body: Any, **changes: Any) -> For:
    """Return a loop equal to `loop` but for its body and the named fields."""
    fields = {
        "loop_var": loop.loop_var,
        "min": loop.min,
        "extent": loop.extent,
        "kind": ForKind(int(loop.kind)),
        "thread_binding": loop.thread_binding,
        "annotations": dict(loop.annotations),
    } | changes
    return For(
        fields["loop_var"],
        fields["min"],
        fields["extent"],
        fields["kind"],
        body,
        fields["thread_binding"],
        fields["annotations"],
    )


def block_like(block: SBlock, **changes: Any) -> SBlock:
    """Return a block equal to `block` but for the named fields."""
    names = (
        "iter_vars",
        "reads",
        "writes",
        "name_hint",
        "body",
        "init",
        "alloc_buffers",
        "match_buffers",
        "annotations",
    )
    return SBlock(*(changes.get(name, getattr(block, name)) for name in names))


def constant(expression: Any) -> int | None:
    """Value of an integer immediate, or None."""
    if isinstance(expression, int):
        return expression
    return int(expression.value) if isinstance(expression, tirx.IntImm) else None


def terms(condition: Any) -> list[Any]:
    """Conditions that hold together where `condition` does."""
    if isinstance(condition, tirx.And):
        return terms(condition.a) + terms(condition.b)
    return [condition]


def conjunction(conditions: Iterable[Any]) -> Any:
    """The condition that holds where all of `conditions` do."""
    parts = list(conditions)
    return functools.reduce(tirx.And, parts) if parts else tirx.IntImm("bool", 1)


# CUDA text, which we compile ourselves.

#: What TVM compiles its text by where there is a driver, as soon as it is written.
_COMPILE = "tvm_callback_cuda_compile"
_thread = threading.local()


def cuda_text(module: IRModule, target: Any) -> str:
    """CUDA text of a module of kernels, which TVM does not compile.

    It would take as long for it as we do, a second for a small kernel, and needs cuda-bindings
    unless ``TVM_CUDA_COMPILE_MODE`` is nvcc.
    """
    _compile_nothing_here()
    _thread.writes = True
    try:
        return str(tvm.get_global_func("target.build.cuda")(module, target).inspect_source())
    finally:
        _thread.writes = False


@functools.cache
def _compile_nothing_here() -> None:
    """Have TVM compile nothing in threads that are in `cuda_text`, and other text as before."""
    import tvm.support.nvcc  # TVM's own function is there before it is replaced

    compiled = tvm.get_global_func(_COMPILE)

    def unless_writing(code: str) -> Any:
        return b"" if getattr(_thread, "writes", False) else compiled(code)

    tvm.register_global_func(_COMPILE, unless_writing, override=True)


# Passes of ours.


def prim_func_pass(name: str, transform: Callable[[Any], Any]) -> Any:
    """Make a TVM pass, called ``crossfuse.<name>``, of a function from PrimFunc to PrimFunc.

    `transform` returns the function itself where there is nothing to do.
    """

    def run(func: Any, _mod: Any, _ctx: Any) -> Any:
        return transform(func)

    return tirx.transform.prim_func_pass(run, opt_level=0, name=f"crossfuse.{name}")


def body_pass(name: str, mark: str, change: Callable[[Any], Any]) -> Any:
    """Make a TVM pass, called ``crossfuse.<name>``, of a function from body to body.

    Only functions with the attribute `mark` are changed.
    """

    def transform(func: Any) -> Any:
        if func.attrs is None or mark not in func.attrs:
            return func
        body = change(func.body)
        return func if body.same_as(func.body) else with_body(func, body)

    return prim_func_pass(name, transform)
