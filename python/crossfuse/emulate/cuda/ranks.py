"""All GPUs of a group at the same time: each runs its launches, and all share their windows."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from crossfuse.calls import AtLeastOne, Seconds, Seed, checked
from crossfuse.emulate.cuda.arguments import numpy_dtype
from crossfuse.emulate.cuda.run import EmulationReport, Program, examine, prepare
from crossfuse.errors import ArtefactRefused, CheckFailed, Rule, refuse
from crossfuse.lower.image import COUNTS, RANK, BufferSpec, KernelImage, Launch

_refused = Rule(CheckFailed, "emulate-ranks")

#: Of all launches together, each with all of its CTAs: what fits into the runtime's address space.
_MAX_THREADS = 1 << 18


@checked
def emulate_ranks(
    image: KernelImage,
    arguments: Mapping[str, np.ndarray],
    *,
    calls: AtLeastOne = 2,
    seed: Seed = 0,
    orders: AtLeastOne = 2,
    max_findings: AtLeastOne = 8,
    timeout_s: Seconds = 120.0,
    cache: str | os.PathLike[str] | None = None,
) -> EmulationReport:
    """Run what all GPUs of a group run, and report what is wrong with it.

    Each GPU launches its kernels one behind the other, call after call; those of different GPUs run
    at the same time, in shuffled orders, and each begins as late as chance has it. Accesses to
    peers' memory are ordered by releases and acquires at the scope of the system alone.

    Parameters
    ----------
    image : KernelImage
        What one GPU runs: a lowered function over ranks.
    arguments : mapping of str to np.ndarray
        Inputs by name as the function over ranks has them: [ranks, ...] of own buffers, whose slice
        r is that of rank r, else what all GPUs have a copy of.
    calls : int
        Calls of the function, one behind the other, on the same memory.
    seed, orders, max_findings, timeout_s, cache
        See `crossfuse.emulate.cuda.emulate`.

    Returns
    -------
    EmulationReport
        Its outputs are those of all ranks, [ranks, ...]; in findings, ``C[1]`` is that of rank 1.

    Raises
    ------
    ArtefactRefused
        If an array is missing or has another shape.
    CheckFailed
        If the image is of no function over ranks, or too large to run at once.
    EnvironmentRefused
        If there is no g++.

    Examples
    --------
    >>> from crossfuse.emulate.cuda import drop_call
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.ranks import schedule_row_parallel
    >>> from crossfuse.workload import row_parallel
    >>> func = row_parallel(m=4, k=64, n=32, ranks=2, dtype="float32")
    >>> image = lower(schedule_row_parallel(func)).image
    >>> generator = np.random.default_rng(0)
    >>> A = generator.uniform(-1, 1, (2, 4, 32)).astype("float32")  # [ranks, m, k / ranks]
    >>> B = generator.uniform(-1, 1, (2, 32, 32)).astype("float32")  # [ranks, k / ranks, n]
    >>> report = emulate_ranks(image, {"A": A, "B": B})
    >>> report.ok, report.outputs["out"].shape
    (True, (2, 4, 32))
    >>> faulty = drop_call(image, "crossfuse_await_ranks")
    >>> "race" in {each.kind for each in emulate_ranks(faulty, {"A": A, "B": B}).findings}
    True
    """
    start = time.perf_counter()
    program = prepare_ranks(image, arguments, calls, cache)
    report = examine(program, seed, orders, max_findings, timeout_s)
    every, count = (report.outputs, *report.later), _ranks(image)
    outputs, *later = (_stacked(image, each, count) for each in every)
    elapsed = time.perf_counter() - start
    return replace(report, outputs=outputs, later=tuple(later), seconds=elapsed)


def prepare_ranks(
    image: KernelImage,
    arguments: Mapping[str, np.ndarray],
    calls: int,
    cache: str | os.PathLike[str] | None = None,
) -> Program:
    """Check and compile what all GPUs of a group run, as `emulate_ranks` does."""
    count = _ranks(image)
    group = _group(image, count, calls)
    threads = sum(prod(each.grid) * prod(each.block) for each in group.launches)
    if threads > _MAX_THREADS:
        raise _refused(
            image.name,
            found=f"{threads} threads of {calls} calls in {count} GPUs",
            limit=f"{_MAX_THREADS} at the same time",
            instead="emulate a smaller problem, or fewer calls",
        )
    program = prepare(group, _inputs(image, arguments, count), cache)
    streams = tuple(rank for rank in range(count) for _ in range(calls * len(image.launches)))
    return replace(program, streams=streams)


def _ranks(image: KernelImage) -> int:
    for each in image.buffers:
        if each.ranks:
            return each.ranks
    raise _refused(
        image.name,
        found="no buffer in the memory of several GPUs",
        limit="the image of a function over ranks",
        instead="call crossfuse.emulate.cuda.emulate for what one GPU computes alone",
    )


def _group(image: KernelImage, count: int, calls: int) -> KernelImage:
    """The image of all ranks: rank after rank, the launches of all its calls."""
    own = [each for each in image.buffers if not each.ranks]
    windows = [each for each in image.buffers if each.ranks]
    return replace(
        image,
        buffers=tuple(replace(e, name=_of(e.name, rank)) for rank in range(count) for e in own),
        workspaces=tuple(each for each in windows if each.name not in COUNTS),
        state=tuple(each for each in windows if each.name in COUNTS),
        launches=tuple(
            _launch(launch, own, rank)
            for rank in range(count)
            for _ in range(calls)
            for launch in image.launches
        ),
    )


def _of(name: str, rank: int) -> str:
    return f"{name}[{rank}]"


def _launch(launch: Launch, own: list[BufferSpec], rank: int) -> Launch:
    names = {each.name for each in own}
    arguments = (_of(each, rank) if each in names else each for each in launch.arguments)
    return replace(launch, arguments=tuple(arguments))


def _inputs(
    image: KernelImage, arguments: Mapping[str, np.ndarray], count: int
) -> dict[str, np.ndarray]:
    """Arrays of all ranks."""
    found = {_of(RANK, rank): np.array([rank], "int32") for rank in range(count)}
    for each in image.buffers:
        if each.output or each.name == RANK:
            continue
        array = arguments.get(each.name)
        if array is None or tuple(array.shape) not in (each.shape, (count, *each.shape)):
            raise _misfit(each, array, count)
        slices = array if array.ndim > len(each.shape) else [array] * count
        values = (np.asarray(part, numpy_dtype(each.dtype)) for part in slices)
        found |= {_of(each.name, rank): value for rank, value in enumerate(values)}
    return found


def _misfit(buffer: BufferSpec, array: np.ndarray | None, count: int) -> Exception:
    shape = ", ".join(map(str, buffer.shape))
    return refuse(
        ArtefactRefused,
        "emulate-argument",
        buffer.name,
        found="no array" if array is None else f"shape {tuple(array.shape)}",
        limit=f"shape ({count}, {shape}), a slice for each rank, or ({shape}), the same for all",
        instead="pass the arrays of the function over ranks",
    )


def _stacked(
    image: KernelImage, outputs: Mapping[str, np.ndarray], count: int
) -> dict[str, np.ndarray]:
    """Outputs of all ranks, [ranks, ...]; nothing of a run that was stopped."""
    names = [each.name for each in image.buffers if each.output and not each.ranks]
    if not outputs:
        return {}
    return {name: np.stack([outputs[_of(name, rank)] for rank in range(count)]) for name in names}
