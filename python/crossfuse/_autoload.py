"""Entry point of group ``tvm.backends``: TVM calls `register` at the end of ``import tvm``.

So every process that imports TVM, workers of a tuner too, has the primitives and the pipeline.
Both are stand-ins that load the project when they are first used: ``import tvm`` stays as fast as
it was, and may happen inside an import of ours.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Install the schedule primitives and the pipeline; idempotent.

    A runtime-only TVM has neither schedules nor pipelines, and nothing is done.
    """
    import tvm

    if getattr(tvm, "_RUNTIME_ONLY", False):
        return
    from crossfuse.schedule.install import install

    install()
    _install_pipeline()


def _install_pipeline() -> None:
    """Take the place of `s_tir`'s default pipeline, and register ours by name too."""
    from tvm.s_tir import pipeline as _default  # noqa: F401  (registers TVM's own first)
    from tvm.tirx import compilation_pipeline

    registered = compilation_pipeline.PIPELINE_MAP
    stock = registered["s_tir"]
    if hasattr(stock, "crossfuse_wraps"):
        return

    def factory() -> Any:
        from crossfuse.lower.pipeline import make_pipeline

        return make_pipeline(stock)

    factory.crossfuse_wraps = stock  # type: ignore[attr-defined]
    compilation_pipeline.register_tir_pipeline("crossfuse", factory)
    registered["s_tir"] = factory
