"""Two checkers that need no GPU: the schedule run on LLVM, and generated CUDA run on fibers."""

from __future__ import annotations

from typing import Any

__all__ = ["emulate_cuda", "run_sequential"]


def __getattr__(name: str) -> Any:
    if name == "run_sequential":
        from crossfuse.emulate.llvm import run_sequential

        return run_sequential
    if name == "emulate_cuda":
        from crossfuse.emulate.cuda import emulate

        return emulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
