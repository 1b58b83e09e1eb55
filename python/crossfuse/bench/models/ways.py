"""Variants of a model: our backend, torch.compile, and eager torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from crossfuse.bench.job import OURS, OURS_AUTOTUNE, OURS_EAGER
from crossfuse.bench.variant import no_such

if TYPE_CHECKING:
    from crossfuse.models.zoo import Built

#: Modes of ``torch.compile`` by variant. Whoever measures captures CUDA graphs, for all alike.
_TUNED = "max-autotune-no-cudagraphs"
_MODES = {"compile": None, "autotune": _TUNED}
#: Who compiles what our kernels leave, by variant, as fields of the backend.
REST = {
    OURS: {"rest": "inductor"},
    OURS_AUTOTUNE: {"rest": "inductor", "mode": _TUNED},
    OURS_EAGER: {"rest": "eager"},
}
#: Every variant that a model has.
VARIANTS = (*REST, "eager", *_MODES)


def way(name: str, built: Built, **options: Any) -> tuple[Callable[[], Any], str]:
    """Compile a model as a variant and call it once; gives its computation and a note.

    The note has our kernels and the seconds of the first call, most of which is compilation. The
    computation runs on the model's inputs, on the current stream. Further `options` are those of
    `crossfuse.torch.Backend`, for variants of ours; names that are not in `VARIANTS` are refused.
    """
    import torch

    if name not in VARIANTS:
        limit = "variants of models: " + ", ".join(VARIANTS)
        raise no_such(name, built.spec, limit, "choose some of these")
    module: Any = built.module
    if name in REST:
        from crossfuse.torch import Backend

        backend = Backend(**{**REST[name], **options})
        module = torch.compile(built.module, backend=backend, dynamic=False)
    elif name in _MODES:
        module = torch.compile(built.module, mode=_MODES[name], dynamic=False)
    before = _seen() if name in REST else 0
    start = time.perf_counter()
    module(*built.inputs)
    seconds = time.perf_counter() - start
    kernels = f"{_fused(before)}; " if name in REST else ""
    return lambda: module(*built.inputs), f"{kernels}first call {seconds:.1f} s"


def _seen() -> int:
    from crossfuse.torch import reports

    return len(reports())


def _fused(before: int) -> str:
    """Kernels of ours in the graphs that this process compiled after the first `before`."""
    from crossfuse.torch import reports

    new = reports()[before:]
    found = Counter(name for each in new for name in each.fused)
    left = [each.reason for each in new if each.reason]
    named = [f"{name} x{count}" if count > 1 else name for name, count in found.items()]
    return ", ".join([*named, *left]) or "nothing fused"
