"""The planner's word and the measured choice over shapes drawn at random, on this machine's GPU.

    python scripts/measured_choice.py --seconds 500 --out measured-choice

Of each shape the first few kernels of the plan and torch's separate kernels are timed, as
`crossfuse.compile(..., measure=True)` does; what won, and the separate kernels, once more, to see
whether the choice holds. Kernels are built by several processes while others are timed. Each shape
is a line of ``shapes.jsonl`` as soon as it is known, each kernel with its tiles one of
``candidates.jsonl``, which ``scripts/fit_costs.py`` reads, and ``summary.json`` says how good
estimates and choices were. ``--dry-run`` shows it without a GPU: nothing is built, and times are
made up.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from crossfuse.errors import RefusedError
from crossfuse.hardware import device
from crossfuse.measure.choice import NOISE, SEPARATE, Entrant, Measured, Timed, faster
from crossfuse.measure.job import LIBRARY, SPEC, Taken, Way
from crossfuse.measure.timer import Timer, find_timer
from crossfuse.planner.families import EAGER
from crossfuse.schema import typed

#: Extents and rows, and columns of rows that are reduced.
DIMS, ROWS, COLUMNS = (256, 16384), (1, 1024), (256, 262144)
ACTS = ("gelu", "gelu_tanh", "relu", "silu")
#: How often extents are multiples of these: most models', those of odd widths, and any number.
STEPS = ((64, 5), (8, 4), (1, 1))


@dataclass(frozen=True)
class Prepared:
    """A shape whose kernels are built."""

    spec: str
    entrants: tuple[Entrant, ...] = ()
    plans: tuple[Any, ...] = ()  # of the options, by place
    eager: float | None = None  # estimated microseconds of not fusing
    refused: str = ""


class MadeUp:
    """A timer of no GPU: times differ from estimates by chance, and one kernel in twelve fails."""

    gpu = target = "made up"

    def __init__(self, estimates: dict[str, float]) -> None:
        self.estimates = estimates

    def time(self, way: Way) -> Taken:
        """The estimate, a little off."""
        chance = random.Random(crc32(way.source.encode()))
        if way.kind == LIBRARY and not chance.randrange(12):
            return Taken(message="crashed: made up")
        found = self.estimates[way.source] * chance.uniform(0.85, 1.2)
        return Taken(found, found * 0.995)

    def close(self) -> None:
        """Nothing is held."""


def shapes(count: int, seed: int) -> list[str]:
    """Texts of workloads: chains, gated feed-forward layers, and rows that are reduced."""
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[_shape(draw, len(found))] = None
    return list(found)


def _shape(draw: random.Random, place: int) -> str:
    def extent(limits: tuple[int, int]) -> int:
        step = draw.choices([each for each, _ in STEPS], [often for _, often in STEPS])[0]
        low, high = limits
        return max(step, int(low * (high / low) ** draw.random()) // step * step)

    rows = int(ROWS[0] * (ROWS[1] / ROWS[0] + 0.999) ** draw.random())
    kind = ("gemm_chain", "gated_ffn", "gemm_chain", "gated_ffn", "rows")[place % 5]
    if kind != "rows":
        k, n, last = (extent(DIMS) for _ in range(3))
        bias = ",bias=first+last" if kind == "gemm_chain" and draw.random() < 0.5 else ""
        act = draw.choice(ACTS)
        return f"{kind}:M={rows},K={k},N={n},L={last},act={act},weights=nk,dtype=bfloat16{bias}"
    of_rows = draw.choice(("softmax", "layernorm", "cross_entropy", "rmsnorm_gemm"))
    if of_rows == "rmsnorm_gemm":
        return f"{of_rows}:tokens={rows},K={extent(DIMS)},N={extent(DIMS)}"
    return f"{of_rows}:rows={rows},cols={extent(COLUMNS)}"


def prepare(
    spec: str, folder: str, few: int, others: int, target: str | None, build: bool
) -> Prepared:
    """Plan a shape and build its first few kernels, and others of the plan; needs no GPU."""
    from crossfuse.compiler import read_source
    from crossfuse.compiler.compiled import options_of
    from crossfuse.compiler.measure import entrants, name_of
    from crossfuse.planner.choice import not_fusing

    try:
        source, spec_target = read_source(spec), device(target)
        options = options_of(source, spec_target)
        plans = [each.plan for each in options if each.plan is not None]
        eager = not_fusing(plans) if plans else None
        # Kernels of ordinary instructions have no estimate, and may take seconds.
        options = [each for each in options if each.plan is not None] or options
        behind = options[few:]
        drawn = random.Random(spec).sample(behind, min(others, len(behind)))
        options = [*options[:few], *drawn]
        if build:
            where = Path(tempfile.mkdtemp(dir=folder))
            made = entrants(source, options, spec_target, where, len(options))
        else:
            made = [
                Entrant(at, name_of(each, at), each.plan and each.plan.microseconds, None)
                for at, each in enumerate(options)
            ]
        whole = str(source.cascade or source.spec)
        return Prepared(whole, tuple(made), tuple(each.plan for each in options), eager)
    except RefusedError as error:
        return Prepared(spec, refused=str(error))
    except Exception as error:  # one broken shape must not hide the others
        return Prepared(spec, refused=f"{type(error).__name__}: {error}"[:600])


def made_up(every: Sequence[Prepared]) -> tuple[list[Prepared], MadeUp]:
    """Shapes with ways that lead nowhere, and a timer that knows them."""
    estimates: dict[str, float] = {}
    found = []
    for each in every:
        entrants = []
        for one in each.entrants:
            way = Way(LIBRARY, f"{each.spec} {one.place}")
            estimates[way.source] = one.estimate or 50.0
            entrants.append(Entrant(one.place, one.name, one.estimate, way))
        estimates[each.spec] = each.eager or 50.0
        found.append(Prepared(each.spec, tuple(entrants), each.plans, each.eager, each.refused))
    return found, MadeUp(estimates)


def judge(shape: Prepared, timer: Timer, modes: Sequence[str | None]) -> dict[str, Any]:
    """Time a shape: all kernels and separate ones, then what won and these once more."""
    if shape.refused:
        return {"spec": shape.spec, "refused": shape.refused}
    ours = tuple(
        Timed(
            each.place,
            each.name,
            each.estimate,
            timer.time(each.way) if each.way else Taken(message=each.message),
        )
        for each in shape.entrants
    )
    ways = [Way(SPEC, shape.spec, mode=mode) for mode in modes]
    times = [timer.time(each) for each in ways]
    ran = [at for at, each in enumerate(times) if each.microseconds is not None]
    least = min(ran, key=lambda at: times[at].microseconds or 0.0) if ran else 0
    found = Measured(timer.gpu, ours, Timed(-1, SEPARATE, shape.eager, times[least]))
    row: dict[str, Any] = {"spec": shape.spec, "measured": found.to_json(), "fuse": found.fuse}
    row["separate"] = {str(mode): asdict(each) for mode, each in zip(modes, times, strict=True)}
    best = found.best
    if best is not None:
        row["best"] = best.place
        way = next(each.way for each in shape.entrants if each.place == best.place)
        assert way is not None
        row["again"] = {
            "best": asdict(timer.time(way)),
            "separate": asdict(timer.time(ways[least])),
        }
    return row


def candidates(shape: Prepared, row: dict[str, Any], gpu: str) -> list[str]:
    """What was timed of a shape, as lines that `scripts/fit_costs.py` reads.

    Not kernels without a plan, nor those on padded copies, whose time is part of theirs.
    """
    measured = typed(Measured, row["measured"])
    timed = [(shape.plans[each.place], each) for each in measured.ours]
    found = [
        (plan.family, dict(plan.tiles), each)
        for plan, each in timed
        if plan is not None and "padding" not in plan.terms
    ]
    if found and measured.baseline is not None:
        found.append((EAGER, {}, measured.baseline))
    return [
        json.dumps(
            {
                "candidate": {"spec": shape.spec, "family": family, "tiles": tiles},
                "status": "ok",
                "microseconds": each.taken.microseconds,
                "minimum": each.taken.least,
                "estimate": each.estimate,
                "gpu": gpu,
            },
            default=dict,
        )
        for family, tiles, each in found
        if each.taken.microseconds
    ]


@dataclass(frozen=True)
class Row:
    """What `judge` found of a shape, with the times that summaries need."""

    spec: str
    found: Measured
    again: tuple[Taken, Taken] | None  # what won among ours, and separate kernels

    @property
    def times(self) -> list[tuple[float, float]]:
        """Estimated and measured microseconds of kernels of ours."""
        return [
            (each.estimate, each.taken.microseconds)
            for each in self.found.ours
            if each.estimate and each.taken.microseconds
        ]

    @property
    def first(self) -> Timed:
        """The planner's choice."""
        return self.found.ours[0]

    @property
    def separate(self) -> float | None:
        """Microseconds of separate kernels."""
        return self.found.baseline.taken.microseconds if self.found.baseline else None

    @property
    def loss(self) -> float | None:
        """By which share the first choice is slower than the best one measured."""
        best, mine = self.found.best, self.first.taken.microseconds
        if best is None or mine is None or best.taken.microseconds is None:
            return None
        return mine / best.taken.microseconds - 1

    @property
    def right(self) -> bool | None:
        """Whether the planner fuses where its choice is faster; if both are alike it is right."""
        other = self.found.baseline
        if other is None or other.estimate is None or self.first.estimate is None:
            return None
        if self.first.taken.microseconds is None or other.taken.microseconds is None:
            return None
        said = self.first.estimate < other.estimate
        wrong = (other.taken, self.first.taken) if said else (self.first.taken, other.taken)
        return not faster(*wrong)

    @property
    def kept(self) -> float | None:
        """Time of the measured choice over that of separate kernels, both measured anew."""
        if self.found.fuse is False:
            return 1.0
        if self.again is None or not all(each.microseconds for each in self.again):
            return None
        return (self.again[0].microseconds or 0.0) / (self.again[1].microseconds or 1.0)


def read_row(value: dict[str, Any]) -> Row:
    """A row of `judge`."""
    again = value.get("again")
    pair = None if again is None else (Taken(**again["best"]), Taken(**again["separate"]))
    return Row(value["spec"], typed(Measured, value["measured"]), pair)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How good estimates and choices were."""
    pairs = [each for row in rows for each in row.times]
    firsts = [
        abs(row.first.estimate / row.first.taken.microseconds - 1)
        for row in rows
        if row.first.estimate and row.first.taken.microseconds
    ]
    signed = [told / seen - 1 for told, seen in pairs]
    losses = [row.loss for row in rows if row.loss is not None]
    right = [row.right for row in rows if row.right is not None]
    kept = [row.kept for row in rows if row.kept is not None]
    eager = [
        abs(row.found.baseline.estimate / row.separate - 1)
        for row in rows
        if row.found.baseline and row.found.baseline.estimate and row.separate
    ]
    inside = [spearman(row.times) for row in rows if len(row.times) > 2]
    return {
        "shapes": len(rows),
        "kernels": len(pairs),
        "median_error_of_first_choices": _median(firsts),
        "median_error_of_kernels": _median([abs(each) for each in signed]),
        "median_signed_error_of_kernels": _median(signed),
        "median_error_of_separate_kernels": _median(eager),
        "mean_loss_of_first_choice": statistics.fmean(losses) if losses else None,
        "worst_loss_of_first_choice": max(losses, default=None),
        "fuse_or_not_right": sum(right) / len(right) if right else None,
        "rank_correlation_of_kernels": spearman(pairs),
        "mean_rank_correlation_within_shapes": statistics.fmean(inside) if inside else None,
        "measured_choice_over_separate": {
            "geometric_mean": statistics.geometric_mean(kept) if kept else None,
            "worst": max(kept, default=None),
            "slower_than_noise": sum(each > 1 + NOISE for each in kept),
        },
    }


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Correlation of ranks."""
    if len(pairs) < 2:
        return None
    ranks = [_ranks([pair[side] for pair in pairs]) for side in (0, 1)]
    if any(len(set(each)) == 1 for each in ranks):
        return 0.0
    return statistics.correlation(*ranks)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(each) + (order.count(each) - 1) / 2 for each in values]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    if "refused" in row:
        return f"{row['spec']:<78} refused: {row['refused'][:90]}"
    read = read_row(row)
    best = read.found.best
    cells = (
        read.first.estimate,
        read.first.taken.microseconds,
        best.taken.microseconds if best else None,
        read.found.baseline.estimate if read.found.baseline else None,
        read.separate,
        read.kept,
    )
    numbers = " ".join(f"{'-' if each is None else format(each, '.2f'):>9}" for each in cells)
    right = {True: "right", False: "WRONG", None: "-"}[read.right]
    faults = "; ".join(
        f"{each.name}: {each.taken.message[:60]}" for each in read.found.ours if each.taken.message
    )
    return f"{row['spec']:<78} {numbers} {right:>6} {best.name if best else '-'} {faults}"


HEAD = f"{'shape':<78} " + " ".join(
    f"{each:>9}" for each in ("foretold", "first", "best", "sep. est.", "separate", "kept")
)


def ready(
    texts: Sequence[str], options: argparse.Namespace, target: str | None, folder: str
) -> Iterator[Prepared]:
    """Shapes as their kernels are built, until the time is over."""
    build = not options.dry_run
    # A spawned process has no threads of this one's, which TVM may hold.
    pool = ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"))
    pending: set[Future[Prepared]] = {
        pool.submit(prepare, each, folder, options.few, options.others, target, build)
        for each in texts
    }
    try:
        while pending and (left := options.end - time.monotonic()) > 0:
            done, pending = wait(pending, left, FIRST_COMPLETED)
            yield from (each.result() for each in done)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for each in multiprocessing.active_children():
            each.terminate()


def main() -> None:
    """Draw, build, time, sum up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("measured-choice"))
    parser.add_argument("--seconds", type=float, default=500.0, help="for all of it")
    parser.add_argument("--shapes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--few", type=int, default=4, help="kernels of the plan to time")
    parser.add_argument("--others", type=int, default=0, help="of the rest, drawn by chance")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--spec", action="append", help="this workload instead; may be repeated")
    parser.add_argument("--inductor", action="store_true", help="torch.compile is timed too")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: times are made up")
    options = parser.parse_args()
    options.end = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    texts = options.spec or shapes(options.shapes, options.seed)
    timer: Timer | None = None if options.dry_run else find_timer()
    modes = [None, "default"] if options.inductor else [None]
    rows: list[Row] = []
    print(HEAD, flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="crossfuse-choice-") as folder,
        (options.out / "shapes.jsonl").open("w", encoding="utf-8") as file,
        (options.out / "candidates.jsonl").open("w", encoding="utf-8") as kernels,
    ):
        for shape in ready(texts, options, timer and timer.target, folder):
            if options.end <= time.monotonic():
                break
            shape, here = (shape, timer) if timer else _pretended(shape)
            row = judge(shape, here, modes)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(line(row), flush=True)
            if "measured" in row:
                rows.append(read_row(row))
                kernels.writelines(f"{each}\n" for each in candidates(shape, row, here.gpu))
                kernels.flush()
                document = {"gpu": here.gpu, "few": options.few, "seed": options.seed}
                document |= {"asked": len(texts), **summary(rows)}
                (options.out / "summary.json").write_text(json.dumps(document, indent=1) + "\n")
    if timer is not None:
        timer.close()
    print(json.dumps(summary(rows), indent=1) if rows else "nothing was measured in this time")


def _pretended(shape: Prepared) -> tuple[Prepared, Timer]:
    (found,), timer = made_up([shape])
    return found, timer


if __name__ == "__main__":
    main()
