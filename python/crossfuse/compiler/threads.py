"""Options to schedule a chain as one kernel of ordinary instructions, for any cluster size."""

from __future__ import annotations

from functools import partial
from typing import Any

from crossfuse.compiler.option import Option

#: Tried in order where the caller leaves the cluster size open: portable sizes first.
_CLUSTER_SIZES = (8, 4, 16, 2, 7, 6, 5, 3, 1)


def thread_options(func: Any, cluster: int | None = None) -> list[Option]:
    """Options to schedule a canonical function by the rule for its number of products.

    There is one for each cluster size, or for the given one alone.
    """
    sizes = (cluster,) if cluster else _CLUSTER_SIZES
    return [Option(partial(_by_rule, func, each), why={"rule": "threads"}) for each in sizes]


def _by_rule(func: Any, cluster: int) -> Any:
    from crossfuse import _tvm as ir
    from crossfuse.blocks.chain import read_chain
    from crossfuse.schedule.rules.ffn import schedule_ffn
    from crossfuse.schedule.rules.split_k import schedule_split_k

    single = read_chain(ir.Schedule(func)).second is None
    return (schedule_split_k if single else schedule_ffn)(func, cluster=cluster)
