"""Variants of a model: our backend, torch.compile, and eager torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from crossfuse.bench.job import OURS, OURS_AUTOTUNE, OURS_EAGER, Planned
from crossfuse.bench.variant import no_such
from crossfuse.models.spec import names_one, parse

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


# Compiles models in parallel, before they are timed one after another.

#: Bytes of weights of a model above which it is left to its job: several are on the GPU at once.
_MOST_BYTES = 4 * 10**9


def compile_models(planned: Sequence[Planned], workers: int, timeout: float) -> int:
    """Fill the caches of our kernels and of inductor for timed jobs; returns how many compiled.

    A model that fails, is too large to share the GPU, or is not done after `timeout` seconds, is
    left to its job, which says why. No workers: nothing is compiled.
    """
    wanted = dict.fromkeys(
        (each.job.spec, each.job.variant)
        for each in planned
        if names_one(each.job.spec)
        and each.job.variant != "eager"
        and each.compulsory <= _MOST_BYTES
    )
    if not workers or len(wanted) < 2:
        return 0
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = [pool.submit(_compile, *each) for each in wanted]
        done, _ = wait(futures, timeout)
        pool.shutdown(wait=True, cancel_futures=True)
    return sum(each.exception() is None and each.result() for each in done)


def _compile(spec: str, variant: str, device: str = "cuda") -> bool:
    import torch

    from crossfuse.models.zoo import build

    torch.compiler.reset()
    with torch.no_grad():
        try:
            way(variant, build(parse(spec), device))
        except Exception:  # its job reports it
            return False
    return True
