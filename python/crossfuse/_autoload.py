"""Entry point of group ``tvm.backends``: TVM calls `register` at the end of ``import tvm``.

So every process that imports TVM, workers of a tuner too, has the primitives and the pipeline.
"""

from __future__ import annotations


def register() -> None:
    """Install the schedule primitives and the pipeline; idempotent.

    A runtime-only TVM has neither schedules nor pipelines, and nothing is done.
    """
    import tvm

    if getattr(tvm, "_RUNTIME_ONLY", False):
        return
    from crossfuse.lower.pipeline import install_pipeline
    from crossfuse.schedule.install import install

    install()
    install_pipeline()
