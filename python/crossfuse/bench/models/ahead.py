"""Compiles models in parallel, before they are timed one after another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context

from crossfuse.bench.job import Planned
from crossfuse.models.spec import names_one, parse

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

    from crossfuse.bench.models.ways import way
    from crossfuse.models.zoo import build

    torch.compiler.reset()
    with torch.no_grad():
        try:
            way(variant, build(parse(spec), device))
        except Exception:  # its job reports it
            return False
    return True
