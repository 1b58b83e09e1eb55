"""Attention and its output product as one kernel."""

from __future__ import annotations

from typing import Any

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.rows_first import RowsFirst, attention_first
from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.schedule.rules.rows import schedule_attention_out
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_spec import AttentionOut


def spec(**changed: Any) -> AttentionOut:
    """Two heads of 64 that share keys, 16 queries and 128 keys; but for what is `changed`."""
    given = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": 16, "kv_len": 128, "head_dim": 64}
    return AttentionOut(**{**given, "hidden": 64, **changed})


def scheduled(
    function: Any,
    stream: CascadeTiles | None = None,
    constant: bool = False,
    **tiles: int,
) -> Any:
    """A function of attention and a product as one kernel; early with `constant` weights."""
    parts = attention_first(function)
    assert isinstance(parts, RowsFirst)
    (site,) = detect(parts.rows)
    return schedule_attention_out(
        parts,
        site,
        derive(site.cascade),
        stream=stream or CascadeTiles(rows=64, elements=64),
        tiles=TensorTiles(**{"rows": 64, "columns": 64, "cluster": 1, **tiles}),
        constant_weights=constant,
    )


def of_spec(given: AttentionOut, stream: CascadeTiles | None = None, **more: Any) -> Any:
    """A packaged one."""
    return scheduled(prim_func(given), stream, **more)
