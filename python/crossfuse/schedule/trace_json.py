"""Traces as JSON text: TVM's ``as_json`` leaves integer nodes that ``json`` cannot write."""

from __future__ import annotations

import json
from typing import Any

from crossfuse import _tvm as ir


def trace_json(trace: Any) -> str:
    """Render a trace as text for ``json.loads`` and then ``Trace.apply_json_to_schedule``."""
    return json.dumps(trace.as_json(), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, ir.tirx.IntImm):
        return bool(value.value) if str(value.ty.dtype) == "bool" else int(value.value)
    if isinstance(value, ir.tirx.FloatImm):
        return float(value.value)
    raise TypeError(f"{type(value).__name__} in a trace")
