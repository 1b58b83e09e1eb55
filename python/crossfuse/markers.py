"""The durable marks that a scheduled function carries from the primitives to the lowering.

Only storage scopes and annotations survive a trace, its JSON, a replay and a mutation, so
everything the lowering must know is spelt with them.
"""

from __future__ import annotations

from typing import Any

#: Function attribute that tells later passes that `lower_cluster` rewrote it.
LOWERED = "crossfuse.lowered"
#: Loop annotation of `cluster_bind`; the value is the cluster axis, "x", "y" or "z".
CLUSTER_AXIS = "crossfuse.cluster_axis"
#: Storage scope of a buffer whose leading dimension is the rank: slab r lives in CTA r.
DSM_SCOPE = "shared.dsm"
#: Those of buffers in shared memory that a CTA has for itself.
SHARED_SCOPES = ("shared", "shared.dyn")
#: Block annotation of `dsm_reduce` on the combining block: "scatter" or "all-exchange".
DSM_REDUCE = "crossfuse.dsm_reduce"
#: Block annotation of `dsm_shuffle` on the staging block: "ring" or "all-gather".
DSM_SHUFFLE = "crossfuse.dsm_shuffle"

#: Loop annotation of `rank_bind`; the value is 1.
RANK_BOUND = "crossfuse.rank_bound"
#: Storage scope of a buffer whose leading dimension is the rank of a GPU: slab r lives in GPU r.
PEER_SCOPE = "global.peer"

#: Loop annotation: the loop runs as a pipeline of asynchronous tile loads and wgmma; the value is
#: the number of stages in shared memory, 0 for as many as fit.
STAGES = "crossfuse.stages"

#: Loop annotation: the loop goes through tiles of keys, with state of rows that it carries from one
#: to the next, and two products of tiles each time; the value is the number of stages in shared
#: memory, 0 for as many as fit.
STREAM = "crossfuse.stream"

#: Annotation of a loop with stages: no kernel that may still be running writes the right operand,
#: so it may be loaded before the kernel before is over.
CONSTANT = "crossfuse.constant"

#: Annotation of a loop in a nest that makes rows: it goes through chunks of a row, the value is
#: their elements, and a product takes them in as they come.
CHUNKS = "crossfuse.chunks"

#: Block annotation of `grid_stage`: what the block stores is loaded by a later nest of one kernel.
GRID_STAGE = "crossfuse.grid_stage"

#: Annotation of the root block: how many rows a call may have, one of `ROW_COUNTS`. Without it, as
#: many as the function has.
ROWS = "crossfuse.rows"
#: From one row up to as many as the function has.
ROW_COUNTS = ("at most",)

#: Attribute of a function of several kernels: names of buffers, separated by commas, that one
#: stores in global memory for another. They are allocated by the function.
WORKSPACES = "crossfuse.workspaces"

#: Annotation of the root block: inputs have padded rows, and callers pass shorter ones, of the
#: shapes that are the value, such as "16,65;65,131".
UNPADDED = "crossfuse.unpadded"
#: Annotation of the same block: what rows of the first input and of the products but the last have
#: without padding, such as "65,131"; of a single product its result, too. Callers may pass weights
#: that they padded.
UNPADDED_COLUMNS = "crossfuse.unpadded_columns"

#: Annotation of a block that reduces a tuple over threads: its body binds the right state, number
#: by number, then what merging computes; stores come last. See `crossfuse.lower.lower_merges`.
MERGE = "crossfuse.merge"
#: Annotation of the same block: for each number of the tuple its value in every one of the states
#: that are merged, where that is known and sums, such as the count of elements; else 0.
MERGE_EQUAL = "crossfuse.merge_equal"
#: Annotation of what such a block becomes: all threads end with equal results.
MERGED = "crossfuse.merged"

#: Annotation of a block that stores into the slabs of all CTAs of a cluster: together they fill
#: every slab, each element once, and no peer reads or writes them otherwise. See
#: `crossfuse.lower.slabs`.
PUSH = "crossfuse.push"

#: Attribute of a function, or annotation of its root block: its exponentials may be approximate,
#: see `crossfuse.lower.pipeline`.
FAST = "crossfuse.fast_exponentials"

#: Attribute of a function: its kernels start while the kernel before them runs, see
#: `crossfuse.lower.image`. The value names the parameters that no kernel writes which may still be
#: running then, such as "B_gate,D"; what kernels read of all others waits.
EARLY = "crossfuse.early"

#: As `FAST`: CTAs that one multiprocessor shall hold at least; registers are limited accordingly,
#: and up to that limit loads are not put off to save any.
RESIDENT_CTAS = "crossfuse.resident_ctas"

#: As `FAST`: nests of the root stand side by side in one launch, each has CTAs of its own, see
#: `crossfuse.lower.kernel`.
SIDE_BY_SIDE = "crossfuse.side_by_side"

#: Annotation of loops: a warp multiplies by its tensor cores what stands in them. The value is what
#: a loop counts, see `crossfuse.lower.warp_products`: columns and rows of the output, eight rows
#: each, elements of the reduction, lanes whose sums are added up; or sums that become zero.
WARP_PRODUCT = "crossfuse.warp_product"
COLUMN, ROW, ROW_TILE, ELEMENT, LANE, ZERO = "column", "row", "rows", "element", "lane", "zero"
TERM = "term"

#: Annotation of a loop: it loads what a kernel that starts early may ask for before it waits, where
#: that is constant, see `crossfuse.lower.kernel`.
AHEAD = "crossfuse.ahead"

AXES = ("x", "y", "z")
#: Thread tags whose launch TVM gets wrong; `cluster_bind` is the cure.
NAIVE_TAGS = tuple(f"clusterCtaIdx.{axis}" for axis in AXES)

MAX_CLUSTER = 16
#: GPUs that share NVLink in one host, of an HGX H100 board.
MAX_RANKS = 8
#: CTAs at most of a kernel that waits for its peers in its middle, and no more than there are
#: multiprocessors: all of them have to run at the same time. Each has its own part of a slab.
MOST_EXCHANGING = 128
DSM_DTYPES = (
    "float16",
    "bfloat16",
    "float32",
    "int32",
    "float8_e4m3fn",
    "float8_e5m2",
)


def cluster_axis(loop: Any) -> str | None:
    """Axis of a cluster-bound ``For``, or None."""
    value = loop.annotations.get(CLUSTER_AXIS)
    return None if value is None else str(value)


def is_rank_bound(loop: Any) -> bool:
    """Whether a ``For`` is bound to the GPUs of a group."""
    return RANK_BOUND in loop.annotations


def spans_ranks(func: Any) -> bool:
    """Whether a PrimFunc says what several GPUs compute together."""
    from crossfuse import _tvm as ir

    blocks = ir.nodes(func.body, ir.SBlock)
    return any(map(is_rank_bound, ir.nodes(func.body, ir.For))) or any(
        buffer.scope() == PEER_SCOPE for each in blocks for buffer in each.alloc_buffers
    )


def thread_tag(loop: Any) -> str:
    """Thread tag of a bound ``For`` ("" for any other loop)."""
    return str(loop.thread_binding.thread_tag) if loop.thread_binding is not None else ""


def is_cluster_function(func: Any) -> bool:
    """Whether a PrimFunc carries any of our marks, or TVM's own cluster tag.

    All others are lowered as stock TVM always did.
    """
    from crossfuse import _tvm as ir

    loops, blocks = ir.nodes(func.body, ir.For), ir.nodes(func.body, ir.SBlock)
    return (
        any(cluster_axis(each) is not None or thread_tag(each) in NAIVE_TAGS for each in loops)
        or any(MERGE in each.annotations for each in blocks)
        or any(buffer.scope() == DSM_SCOPE for each in blocks for buffer in each.alloc_buffers)
    )


def noted_attributes(func: Any) -> dict[str, Any]:
    """Attributes of a function that a schedule could only annotate its root block with."""
    from crossfuse import _tvm as ir

    if not isinstance(func.body, ir.SBlockRealize):
        return {}
    notes = func.body.block.annotations
    return {each: notes[each] for each in (FAST, RESIDENT_CTAS, SIDE_BY_SIDE) if each in notes}


def has_stages(loop: Any) -> bool:
    """Whether a loop runs as a pipeline."""
    return STAGES in loop.annotations


def has_stream(loop: Any) -> bool:
    """Whether a loop goes through tiles of keys."""
    return STREAM in loop.annotations


def holds_stream(node: Any) -> bool:
    """Whether a statement has a loop that streams tiles."""
    from crossfuse import _tvm as ir

    return any(map(has_stream, ir.nodes(node, ir.For)))


def is_tile_program(func: Any) -> bool:
    """Whether a schedule asks for the Hopper pipeline: a loop has stages, or streams tiles."""
    from crossfuse import _tvm as ir

    return any(has_stages(each) or has_stream(each) for each in ir.nodes(func.body, ir.For))


def is_reduced(func: Any) -> bool:
    """Whether a stream's tiles are products of pipelined loops."""
    from crossfuse import _tvm as ir

    streams = (each for each in ir.nodes(func.body, ir.For) if has_stream(each))
    return any(has_stages(each) for loop in streams for each in ir.nodes(loop.body, ir.For))


def staged_blocks(func: Any) -> list[Any]:
    """Blocks of a function that `grid_stage` was called for."""
    return marked_blocks(func, GRID_STAGE)


def marked_blocks(func: Any, mark: str) -> list[Any]:
    """Blocks of a function with an annotation."""
    return marked_blocks_in(func.body, mark)


def marked_blocks_in(body: Any, mark: str) -> list[Any]:
    """Blocks below a statement with an annotation."""
    from crossfuse import _tvm as ir

    return [each for each in ir.nodes(body, ir.SBlock) if mark in each.annotations]


def starts_early(func: Any) -> bool:
    """Whether a function's kernels start while the kernel before them runs."""
    return EARLY in (func.attrs or {})


def constant_parameters(func: Any) -> tuple[str, ...]:
    """Parameters of such a function that no kernel writes which may still be running."""
    text = str(func.attrs[EARLY]) if starts_early(func) else ""
    return tuple(each for each in text.split(",") if each)


def workspace_names(func: Any) -> tuple[str, ...]:
    """Buffers of a function that pass from one of its kernels to another."""
    text = str((func.attrs or {}).get(WORKSPACES, ""))
    return tuple(each for each in text.split(",") if each)


def unpadded_shapes(func: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of the inputs as callers pass them; empty if no rows are padded."""
    text = str(func.body.block.annotations.get(UNPADDED, ""))
    return tuple(tuple(map(int, each.split(","))) for each in text.split(";") if each)


def unpadded_columns(func: Any) -> tuple[int, ...]:
    """Columns of the first input and of all intermediates of a function with padded rows.

    Of a single product they are those of its input and result.
    """
    return tuple(map(int, str(func.body.block.annotations[UNPADDED_COLUMNS]).split(",")))


def was_lowered(func: Any) -> bool:
    """Whether `lower_cluster` rewrote a function."""
    return func.attrs is not None and LOWERED in func.attrs
