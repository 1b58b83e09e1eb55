"""The cascades of a function, also where products that are none of theirs follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.attention_first import attention_first
from crossfuse.cascade.rewrite.rows_first import rows_before_chain
from crossfuse.cascade.site import Site


def sites_of(func: Any) -> tuple[Site, ...]:
    """The cascades of a function.

    Products behind a cascade reduce what other reductions make, which is no cascade of theirs: of
    attention and its output product that of attention is found, of rows in front of a chain of
    products those of the rows.
    """
    parts = attention_first(func)
    if parts is not None:
        return tuple(replace(each, after=parts) for each in detect(parts.rows))
    parts = rows_before_chain(func)
    if parts is not None:
        return tuple(replace(each, function=func) for each in detect(parts.rows))
    return detect(func)
