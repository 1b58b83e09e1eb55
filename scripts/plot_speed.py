"""Draws how fast fused kernels are beside the fastest other way: the plot of the README.

    python scripts/plot_speed.py                                   # docs/speed-h100.svg
    python scripts/plot_speed.py --gpu "NVIDIA H200" --out mine.svg

A dot is a workload at one number of rows, from ``benchmarks/results``. Its place is the time of the
fastest baseline that any record of the GPU has, over ours. Ours is what the compiler chooses by
default in the newest record, the slowest of a day; where no record has that, the fastest placement.
Baselines whose numbers are wrong by the check against float64 are not counted. Nothing else is left
out, so that losses show as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from crossfuse.bench.job import OURS, OWN
from crossfuse.workload.suites import entry, ids

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "docs" / "speed-h100.svg"
GPU = "NVIDIA H100 80GB HBM3"

#: What a row of the plot holds: kinds of workloads, and kinds of cascades.
GROUPS = {
    "gated FFNs": ("gated_ffn",),
    "chains of two products": ("gemm_chain",),
    "chains of convolutions": ("conv_chain",),
    "attention": ("attention", "decode_attention", "mla_decode"),
    "norm or quantiser + product": ("rmsnorm_gemm", "quant_gemm"),
    "softmax, norms, cross entropy": (),  # all other cascades
    "single products": ("gemm",),
    "whole models": ("model",),
}
REST = "softmax, norms, cross entropy"
#: Name and colour of a baseline by the beginning of its variant; safe for the colour-blind.
BASELINES = {
    "eager": ("eager: cuBLAS, cuDNN", "#0072b2"),
    "scaled-mm": ("eager: cuBLAS, cuDNN", "#0072b2"),
    "compile": ("torch.compile", "#e69f00"),
    "autotune": ("torch.compile, max-autotune", "#d55e00"),
    "sdpa": ("fused attention of cuDNN, FlashAttention", "#009e73"),
}
_MODEL = re.compile(r"\S+ whole \d+ [\d.]+ ")


@dataclass(frozen=True)
class Time:
    """One measurement.

    Attributes
    ----------
    workload : str
        Label and rows, the same in all records.
    variant : str
        Key of `crossfuse.bench.job.VARIANTS`.
    microseconds : float
        Its time.
    date : str
        Of the record.
    """

    workload: str
    variant: str
    microseconds: float
    date: str


@dataclass(frozen=True)
class Point:
    """One dot: `speedup` is the time of `baseline`, the fastest, over ours."""

    workload: str
    group: str
    baseline: str
    speedup: float


def times(folder: Path, gpu: str) -> Iterator[Time]:
    """Every measurement of a GPU in a folder of results, those of whole models too."""
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        made = found.get("environment", {})
        if "comparisons" in found and made["gpu"]["name"] == gpu:
            for row in found["rows"]:
                job, timing = row["job"], row["timing"]
                if timing["microseconds"] is not None and timing["status"] == "ok":
                    name = f"{_label(row['workload'])}, {row['M']} rows, {job['l2']}"
                    yield Time(name, job["variant"], timing["microseconds"], made["date"])
    for path in sorted(folder.glob("models*.txt")):
        text = path.read_text(encoding="utf-8")
        if text.lstrip("# ").startswith(gpu):
            yield from _models(text)


def _label(text: str) -> str:
    """A label with its options in one order."""
    head, _, options = text.partition(":")
    return ":".join([head, *filter(None, [",".join(sorted(options.split(",")))])])


def _models(text: str) -> Iterator[Time]:
    """Lines such as ``bert-base whole 16 555.0 640.5 597.6``, under the names of their columns."""
    names: list[str] = []
    for words in map(str.split, text.replace("mlp eager", "mlp-eager").splitlines()):
        if words[:3] == ["model", "part", "tokens"]:
            names = words[3:]
        elif _MODEL.match(" ".join(words)):
            for variant, value in zip(names, words[3:], strict=False):
                if value != "-" and (variant in OWN or _baseline(variant)):
                    yield Time(f"model:{words[0]}, {words[2]} rows", variant, float(value), "")


def _baseline(variant: str) -> str:
    """Key of `BASELINES` that a variant belongs to; empty for none."""
    return next((each for each in BASELINES if f"{variant}-".startswith(f"{each}-")), "")


def points(found: Sequence[Time]) -> list[Point]:
    """A dot for each workload that has a time of ours and one of a baseline, by name."""
    made = []
    for workload in sorted({each.workload for each in found}):
        here = [each for each in found if each.workload == workload]
        others = [each for each in here if _baseline(each.variant)]
        own = [each for each in here if each.variant in OWN]
        if own and others:
            best = min(others, key=lambda each: each.microseconds)
            speedup = best.microseconds / _ours(own)
            made.append(Point(workload, _group(workload), _baseline(best.variant), speedup))
    return made


def _ours(own: Sequence[Time]) -> float:
    default = [each for each in own if each.variant == OURS]
    newest = max(each.date for each in default or own)
    of_day = [each.microseconds for each in default or own if each.date == newest]
    return max(of_day) if default else min(of_day)


def _group(workload: str) -> str:
    head = workload.split(",")[0].split(":")[0]
    kind = entry(head).values.get("kind", entry(head).kind) if head in ids() else head
    return next((group for group, kinds in GROUPS.items() if kind in kinds), REST)


def digest(made: Sequence[Point]) -> str:
    """What a plot says that it shows, so that a stale one is found."""
    shown = [[each.workload, each.baseline, round(each.speedup, 4)] for each in made]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def mean(made: Sequence[Point]) -> float:
    """Geometric mean of the speed-ups."""
    return math.exp(sum(math.log(each.speedup) for each in made) / len(made))


def draw(made: Sequence[Point], gpu: str, path: Path) -> None:
    """Write the plot; the same points give the same file."""
    figures: Any = import_module("matplotlib.figure")
    groups = [name for name in GROUPS if any(each.group == name for each in made)]
    figure = figures.Figure(figsize=(9, 0.42 * len(groups) + 1.6), layout="constrained")
    ax = figure.subplots()
    for at, name in enumerate(groups):
        here = [each for each in made if each.group == name]
        _row(ax, at, here)
        lost = sum(each.speedup < 1 for each in here)
        said = f"{mean(here):.2f} x, slower on {lost} of {len(here)}"
        ax.text(1.01, at, said, transform=ax.get_yaxis_transform(), va="center", fontsize=9)
    ax.text(1.01, -0.8, "geometric mean", transform=ax.get_yaxis_transform(), fontsize=9)
    slowest = min(each.speedup for each in made)
    ax.set_xscale("log")
    ax.set_xlim(left=min(0.9, 0.97 * slowest))
    ax.axvline(1, color="black", linewidth=1)
    ax.axvspan(ax.get_xlim()[0], 1, color="#cc0000", alpha=0.07, linewidth=0)
    ax.set_yticks(range(len(groups)), groups)
    ax.set_ylim(len(groups) - 0.5, -0.6)
    ticks = [each for each in (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 5, 10) if _inside(ax, each)]
    ax.set_xticks(ticks, [f"{each:g} x" for each in ticks])
    ax.minorticks_off()
    ax.grid(axis="x", alpha=0.3)
    ax.set_xlabel("speed over the fastest of the baselines; left of 1 Crossfuse is slower")
    ax.set_title(f"{gpu}: {len(made)} workloads", fontsize=10)
    marks: Any = import_module("matplotlib.lines")
    legend = {label: colour for label, colour in BASELINES.values()}
    handles = [
        marks.Line2D([], [], marker="o", linestyle="", color=colour, label=label)
        for label, colour in legend.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(left=False)
    settings = {"svg.fonttype": "none", "svg.hashsalt": "crossfuse"}
    told = {"Date": None, "Creator": None, "Description": digest(made)}
    with import_module("matplotlib").rc_context(settings):
        figure.savefig(path, metadata=told)


def _row(ax: Any, at: int, here: Sequence[Point]) -> None:
    """The dots of one group, spread a little so that equal ones are seen."""
    for place, each in enumerate(sorted(here, key=lambda each: each.speedup)):
        height = at + 0.1 * (place % 5 - 2)
        ax.plot(each.speedup, height, "o", color=BASELINES[each.baseline][1], ms=5, alpha=0.8)


def _inside(ax: Any, value: float) -> bool:
    low, high = ax.get_xlim()
    return bool(low <= value <= high)


def report(made: Sequence[Point]) -> Iterator[str]:
    """Lines for a person: a mean for each group, and every loss."""
    for name in GROUPS:
        here = [each for each in made if each.group == name]
        if here:
            yield f"{name}: {mean(here):.2f} of {len(here)}"
    for each in sorted(made, key=lambda each: each.speedup):
        if each.speedup < 1:
            yield f"slower: {each.workload}: {each.speedup:.3f} of {each.baseline}"


def main() -> int:
    """Draw the plot and print what it shows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default=GPU, help="name in the records")
    parser.add_argument("--out", type=Path, default=PLOT)
    given = parser.parse_args()
    made = points(list(times(RESULTS, given.gpu)))
    draw(made, given.gpu, given.out)
    print("\n".join(report(made)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
