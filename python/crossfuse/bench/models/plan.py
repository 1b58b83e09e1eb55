"""Turns models of a command line into jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from crossfuse.bench.floor import Floor, roofs_of
from crossfuse.bench.job import Job, Planned
from crossfuse.hardware import device
from crossfuse.models.cost import cost
from crossfuse.models.spec import ModelSpec, parse
from crossfuse.models.widths import Convolutions


def spread(text: str, rows: Sequence[int]) -> list[ModelSpec]:
    """Parse a model and spread it over numbers of new tokens, by default only that of its text."""
    spec = parse(text)
    return [replace(spec, tokens=each) for each in rows] or [spec]


def label(spec: ModelSpec) -> str:
    """The model without its tokens, which have a column of their own in tables."""
    words = str(spec).split(",")
    return ",".join(each for each in words if not each.startswith("tokens="))


def planned(spec: ModelSpec, job: Job) -> list[Planned]:
    """The job of a model; for eager torch also that of its feed-forward networks alone.

    Their share of the time bounds what fusing them can save.
    """
    specs = [spec]
    networks = not isinstance(spec.widths, Convolutions)
    if job.variant == "eager" and spec.part == "whole" and networks:
        specs.append(replace(spec, part="mlp", cache=0, head=False))
    return [_planned(each, job) for each in specs]


def _planned(spec: ModelSpec, job: Job) -> Planned:
    moved, flops = cost(spec)
    least = Floor(moved, flops, roofs_of(device())).microseconds
    own = replace(job, spec=str(spec), calls=1)
    return Planned(label(spec), spec.rows, least, own, moved)
