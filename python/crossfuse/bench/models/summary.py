"""What tables of times leave out about models: shares of feed-forward networks, and means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from crossfuse.bench.job import Row
from crossfuse.bench.models.ways import REST
from crossfuse.models.spec import ModelSpec, names_one, parse


def summary(rows: Sequence[Row]) -> list[str]:
    """Lines about the models among some rows.

    For each model and state of the cache the share that its feed-forward networks have of eager's
    time, and the bound that sets; the kernels of each variant of ours; then geometric means of
    baselines over each of ours.
    """
    times = {
        (parse(row.planned.job.spec), row.planned.job.l2, row.planned.job.variant): row
        for row in rows
        if names_one(row.planned.job.spec)
    }
    places = dict.fromkeys((spec, l2) for spec, l2, _ in times)
    own = dict.fromkeys(name for _, _, name in times if name in REST)
    lines = [each for place in places for each in _shares(times, *place)]
    for name in own:
        for where in places:
            row = times.get((*where, name))
            if row is not None and row.timing.status == "ok":
                lines.append(f"{_place(*where)}: {name}: {row.timing.message}")
    return [*lines, *_means(times, own)]


_Times = dict[tuple[ModelSpec, str, str], Row]


def _shares(times: _Times, spec: ModelSpec, l2: str) -> list[str]:
    whole = _time(times, spec, l2, "eager")
    part = _time(times, replace(spec, part="mlp", cache=0, head=False), l2, "eager")
    if spec.part != "whole" or whole is None or part is None:
        return []
    share = f"{_place(spec, l2)}: feed-forward networks alone {part:.1f} of {whole:.1f} us"
    rest = whole - part
    bound = f"; at no time for them {whole / rest:.2f}x over eager" if rest > 0 else ""
    return [f"{share}, {part / whole:.0%}{bound}"]


def _means(times: _Times, own: Iterable[str]) -> list[str]:
    lines = []
    baselines = dict.fromkeys(name for _, _, name in times if name not in REST)
    wholes = dict.fromkeys((s, l2) for s, l2, _ in times if s.part == "whole")
    for name in own:
        for other in baselines:
            pairs = [(_time(times, *w, other), _time(times, *w, name)) for w in wholes]
            ratios = [theirs / ours for theirs, ours in pairs if theirs and ours]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                lines.append(
                    f"{other} over {name}: {mean:.3f}x (geometric mean of {len(ratios)}), least "
                    f"{min(ratios):.3f}x"
                )
    return lines


def _time(times: _Times, spec: ModelSpec, l2: str, name: str) -> float | None:
    row = times.get((spec, l2, name))
    return None if row is None else row.timing.microseconds


def _place(spec: ModelSpec, l2: str) -> str:
    return f"{spec} ({l2})"
