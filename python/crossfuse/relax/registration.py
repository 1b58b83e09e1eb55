"""Registers our pipeline with TVM: an entry point of ``tvm.backends``, as `crossfuse._autoload`."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Let ``relax.get_pipeline("crossfuse")`` find `crossfuse.relax.pipeline`; idempotent.

    The pipeline is loaded when it is asked for. A runtime-only TVM has none, and nothing is done.
    """
    import tvm

    if getattr(tvm, "_RUNTIME_ONLY", False):
        return
    from tvm.relax import pipeline

    if "crossfuse" not in pipeline.PIPELINE_MAP:
        pipeline.register_pipeline("crossfuse")(_make)


def _make(*args: Any, **kwargs: Any) -> Any:
    from crossfuse.relax.pipeline import pipeline

    return pipeline(*args, **kwargs)
