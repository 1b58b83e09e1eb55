"""Planting faults in generated text, so that a test can show that the emulator catches them.

Calls are found by the names of ``dsm.cuh`` in the bodies of kernels. Edits keep line numbers.
"""

from __future__ import annotations

import re

from crossfuse.calls import checked
from crossfuse.emulate.cuda.text import arguments_of, calls_of, nothing_to_plant, replaced
from crossfuse.lower.image import KernelImage

_BARRIER = "crossfuse_cluster_sync"
_REMOTE = r"crossfuse_dsm_(?:load|store)_b\d+"


@checked
def remove_cluster_barrier(image: KernelImage, index: int = 0) -> KernelImage:
    """Remove one cluster barrier.

    Parameters
    ----------
    image : KernelImage
        A lowered function.
    index : int
        Which one, in the order of the text; negative counts from the last.

    Returns
    -------
    KernelImage
        With the faulty text.

    Raises
    ------
    CheckFailed
        If there is no such barrier.

    Examples
    --------
    >>> from crossfuse.emulate.cuda import emulate
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.split_k import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func, random_inputs
    >>> spec = parse("gemm:M=16,K=64,N=16")
    >>> image = lower(schedule_split_k(prim_func(spec), cluster=4)).image
    >>> report = emulate(remove_cluster_barrier(image), random_inputs(spec))
    >>> "race" in {each.kind for each in report.findings}
    True
    """
    return drop_call(image, _BARRIER, index)


@checked
def drop_call(image: KernelImage, name: str, index: int = 0) -> KernelImage:
    """Remove one call from the kernels of an image.

    Parameters
    ----------
    image : KernelImage
        A lowered function.
    name : str
        Regular expression for the name of the called function.
    index : int
        Which call, in the order of the text; negative counts from the last.

    Returns
    -------
    KernelImage
        With the faulty text.

    Raises
    ------
    CheckFailed
        If there is no such call.

    Examples
    --------
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.split_k import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func
    >>> image = lower(schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=16")), cluster=4)).image
    >>> wrong = drop_call(image, "__syncthreads")
    >>> image.cuda.count("__syncthreads()") - wrong.cuda.count("__syncthreads()")
    1
    """
    start, end = _find_call(image, name, index)
    return replaced(image, start, end, "(void)0")


@checked
def change_argument(
    image: KernelImage, name: str, position: int, by: str, index: int = 0
) -> KernelImage:
    """Change one argument of one call.

    Parameters
    ----------
    image : KernelImage
        A lowered function.
    name : str
        Regular expression for the name of the called function.
    position : int
        Which argument.
    by : str
        What takes its place; ``{}`` stands for what was there.
    index : int
        Which call, in the order of the text; negative counts from the last.

    Returns
    -------
    KernelImage
        With the faulty text.

    Raises
    ------
    CheckFailed
        If there is no such call or argument.

    Examples
    --------
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.split_k import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func
    >>> image = lower(schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=16")), cluster=4)).image
    >>> wrong = change_argument(image, "crossfuse_dsm_load_b32", 1, "({} ^ 1)")
    >>> wrong.cuda != image.cuda
    True
    """
    return _change(image, _find_call(image, name, index), position, by)


def _change(image: KernelImage, span: tuple[int, int], position: int, by: str) -> KernelImage:
    arguments = arguments_of(image.cuda, *span)
    if not -len(arguments) <= position < len(arguments):
        raise nothing_to_plant(image, f"{len(arguments)} arguments", f"one with index {position}")
    start, end = arguments[position]
    return replaced(image, start, end, by.format(f"({image.cuda[start:end].strip()})"))


def _find_call(
    image: KernelImage, name: str, index: int, what: str | None = None
) -> tuple[int, int]:
    spans = calls_of(image.cuda, re.compile(rf"\b{name}\s*\("))
    if not -len(spans) <= index < len(spans):
        found = f"{len(spans)} {what or f'calls of {name}'}"
        raise nothing_to_plant(image, found, f"one with index {index}")
    return spans[index]


@checked
def early_exit(image: KernelImage) -> KernelImage:
    """Remove the last cluster barrier: CTAs exit while peers may still read their memory.

    Parameters
    ----------
    image : KernelImage
        A lowered function.

    Returns
    -------
    KernelImage
        With the faulty text.

    Raises
    ------
    CheckFailed
        If there is no cluster barrier.

    Examples
    --------
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.split_k import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func
    >>> image = lower(schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=16")), cluster=4)).image
    >>> early_exit(image).cuda != image.cuda
    True
    """
    return remove_cluster_barrier(image, -1)


@checked
def wrong_rank(image: KernelImage, index: int = 0, *, wrap: bool = False) -> KernelImage:
    """Address the next rank instead of the right one in one remote access.

    Parameters
    ----------
    image : KernelImage
        A lowered function.
    index : int
        Which remote access, in the order of the text; negative counts from the last.
    wrap : bool
        Whether the rank after the last is 0. Then every rank exists, and only wrong values (or a
        race, or memory that nobody wrote) can show the fault; otherwise the rank is out of range.

    Returns
    -------
    KernelImage
        With the faulty text.

    Raises
    ------
    CheckFailed
        If there is no such remote access.

    Examples
    --------
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.split_k import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func
    >>> image = lower(schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=16")), cluster=4)).image
    >>> wrong_rank(image).cuda != image.cuda
    True
    """
    what = "remote accesses (crossfuse_dsm_load_* and crossfuse_dsm_store_*)"
    span = _find_call(image, _REMOTE, index, what)
    size = max(launch.cluster_size for launch in image.launches)
    rank = f" ({{}} + 1) % {size}" if wrap else " ({} + 1)"
    return _change(image, span, 1, rank)
