"""The page of measurements, written from the recorded results as they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossfuse.bench.table import Comparison, mean_speedup

_HEAD = """# Benchmarks

<!-- Written by docs/_ext/bench_page.py from benchmarks/results/. -->

Everything here was read from the files in `benchmarks/results/`, none left out. A time is the
median of graph replays in microseconds; "best other" is the fastest baseline that was measured
beside it in the same run. Above 1, ours is faster; **losses are in bold**. What each file is, and
which commits' kernels are today's, is in [Recorded results](recorded.md); why numbers are what they
are is in [What was measured](../hopper-measured.md).
"""

_LEFT_OUT = frozenset({"subject", "speedup"})


@dataclass(frozen=True)
class Record:
    """A file of results.

    Attributes
    ----------
    name : str
        Of the file.
    value : Mapping[str, Any]
        What it holds.
    """

    name: str
    value: Mapping[str, Any]

    @property
    def comparisons(self) -> list[Comparison]:
        """Ours beside the best other, for each workload and setting."""
        found = self.value.get("comparisons", ())
        return [
            Comparison(**{key: each[key] for key in each if key not in _LEFT_OUT}) for each in found
        ]

    @property
    def cases(self) -> Sequence[Mapping[str, Any]]:
        """Kernels that were run and checked, not compared."""
        return self.value.get("cases", ())

    @property
    def made_on(self) -> str:
        """Device, versions, commit and date, as far as the file says."""
        held = self.value.get("environment", {})
        gpu, versions = held.get("gpu", {}), held.get("versions", {})
        facts = [
            gpu.get("name", ""),
            f"driver {gpu['driver_version']}" if "driver_version" in gpu else "",
            f"torch {versions.get('torch', held.get('torch', ''))}",
            f"commit {str(held.get('commit', ''))[:7]}",
            held.get("date", ""),
        ]
        return ", ".join(each for each in facts if each and not each.endswith(" "))


def read_records(folder: Path) -> list[Record]:
    """All JSON documents of a folder of results, by name."""
    paths = sorted(folder.glob("*.json"))
    return [Record(each.name, json.loads(each.read_text(encoding="utf-8"))) for each in paths]


def write_bench_page(folder: Path) -> str:
    """The page as Markdown.

    Parameters
    ----------
    folder : Path
        ``benchmarks/results`` of the repository.
    """
    records = read_records(folder)
    compared = [each for each in records if each.comparisons]
    checked = [each for each in records if each.cases]
    told = {each.name for each in (*compared, *checked)}
    rest = [each.name for each in sorted(folder.iterdir()) if each.name not in told]
    parts = [_HEAD, *_losses(compared)]
    for each in compared:
        parts += _table(each)
    parts += ["## Checked on the GPU\n", *_checks(checked), "## Other records\n"]
    parts += [f"- `{name}`" for name in rest]
    return "\n".join(parts) + "\n"


def _losses(records: Iterable[Record]) -> Iterator[str]:
    """What is slower than something else, in front of all."""
    lost = [(each, found) for each in records for found in each.comparisons if found.speedup < 1]
    total = sum(len(each.comparisons) for each in records)
    yield "## Where ours is slower\n"
    yield (
        f"{len(lost)} of {total} comparisons, the worst first. Older files stay in the list. Files "
        "of text are not in it: their losses, such as attention without a mask and one token "
        "beside max-autotune, are in "
        "[What was measured](../hopper-measured.md#cascaded-reductions) and "
        "[Models](../models.md#measured).\n"
    )
    yield "| workload | rows | ours | best other | which | ratio | file |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for record, each in sorted(lost, key=lambda pair: pair[1].speedup):
        yield (
            f"| {_name(each)} | {each.M} | {each.ours:.1f} | {each.best:.1f} | {each.baseline} "
            f"| **{each.speedup:.2f}** | `{record.name}` |"
        )
    yield ""


def _table(record: Record) -> Iterator[str]:
    found = record.comparisons
    yield f"## {record.name.removesuffix('.json')}\n"
    yield f"{record.made_on}. Geometric mean of the ratios: {mean_speedup(found):.2f}.\n"
    yield "| workload | rows | weights | variant | ours | best other | which | ratio |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for each in found:
        ratio = f"{each.speedup:.2f}" if each.speedup >= 1 else f"**{each.speedup:.2f}**"
        yield (
            f"| {_name(each)} | {each.M} | {each.l2} | `{each.variant}` | {each.ours:.1f} "
            f"| {each.best:.1f} | {each.baseline} | {ratio} |"
        )
    yield ""
    yield from _every_time(record)
    refused = [each for each in record.value["rows"] if each["timing"]["status"] != "ok"]
    if refused:
        yield "Without a time:\n"
        for each in refused:
            job, timing = each["job"], each["timing"]
            said = " ".join(str(timing["message"]).split())
            yield f"- {each['workload']}, M = {each['M']}, `{job['variant']}`: {timing['status']}"
            yield f"  (`{said.replace('`', chr(39))}`)" if said else ""
        yield ""


def _every_time(record: Record) -> Iterator[str]:
    """All variants side by side, where more than two were measured."""
    times: dict[tuple[str, int], dict[str, float]] = {}
    for each in record.value["rows"]:
        if each["timing"]["microseconds"] is not None:
            place = times.setdefault((each["workload"], each["M"]), {})
            place[each["job"]["variant"]] = each["timing"]["microseconds"]
    variants = list(dict.fromkeys(name for place in times.values() for name in place))
    if len(variants) < 3:
        return
    yield "All variants (us):\n"
    yield "| workload | rows | " + " | ".join(f"`{each}`" for each in variants) + " |"
    yield "| --- | --- |" + " --- |" * len(variants)
    for (workload, rows), place in times.items():
        cells = (f"{place[each]:.1f}" if each in place else "" for each in variants)
        yield f"| {_short(workload)} | {rows} | " + " | ".join(cells) + " |"
    yield ""


def _checks(records: Iterable[Record]) -> Iterator[str]:
    yield "An error over the allowed one of at most 1 passes, by the"
    yield "[numeric contract](../numerics.md).\n"
    yield "| file | tool | kernels | passed | largest error over allowed | differing runs |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for each in records:
        passed = sum(case["status"] == "passed" for case in each.cases)
        errors = [
            v for case in each.cases for v in case.get("worst_error_over_allowed", {}).values()
        ]
        differing = sum(case.get("differing", 0) for case in each.cases)
        yield (
            f"| `{each.name}` | {each.value.get('sanitizer') or 'numbers'} | {len(each.cases)} "
            f"| {passed} | {max(errors, default=0):.2f} | {differing} |"
        )
    yield ""


def _name(found: Comparison) -> str:
    """Ids as they are, long specs as code."""
    return _short(found.workload)


def _short(workload: str) -> str:
    return workload if len(workload) <= 4 else f"`{workload}`"
