"""Fit the cost model's constants to measured kernels, and say how well it ranks them.

    python scripts/fit_costs.py results.jsonl bench.json ... --out record.json --trees trees.json

Reads results of ``crossfuse bundle`` (JSON lines: candidates with family, tiles and time) and of
``crossfuse bench`` (JSON: our variants with the rules' own tiles). Writes the device's record with
what was fitted, and the trees that learn what is left (with xgboost). Prints residuals by family,
and the mean over chains of the rank correlation and of the regret of the first choices: of the
estimate alone, with trees that saw no kernel of the workload, and with trees that saw all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import read_chain
from crossfuse.errors import RefusedError
from crossfuse.hardware import Device, device
from crossfuse.planner.chain.build import chain_of
from crossfuse.planner.cost.rates import Fitted, Rates, load, measured, rates_from, rates_of
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.registry import FAMILIES, read_kernel
from crossfuse.planner.kernels.shape import Shape, shape_of
from crossfuse.schedule.rules.parted_ffn import ClusterTiles, RegisterTiles
from crossfuse.schedule.rules.tensor_tiles import TensorTiles, complete_pair
from crossfuse.workload import parse, prim_func
from study.compare_spaces import read_measured
from study.fit import Sample, fit, predict, report
from study.grow import Rows, grow, held_out, joined, rows_of, without_eager

#: Variants of the bench, by the family that they are.
_VARIANTS = {f"ours-{each}": each for each in FAMILIES} | {EAGER: EAGER}
#: Fields of tiles that plans name.
_TILES = ("rows", "columns", "cluster", "split", "across", "stacked")
#: Bytes of weights from which on the compiler's own choice is l2.
_WIDE = 6 << 20


def main() -> None:
    """Read, fit, write, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--device", default="nvidia-h100")
    parser.add_argument("--record", type=Path, help="a record to begin with")
    parser.add_argument("--held", nargs="*", default=[], help="constants that stay")
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--trees", type=Path, help="where trees go that learn what is left")
    parser.add_argument(
        "--beside", nargs=2, metavar=("DEVICE", "RESULTS"), help="trees learn from them, too"
    )
    parser.add_argument("--report", type=Path, help="where the reports go, as JSON")
    parser.add_argument("--only-report", action="store_true", help="fit nothing")
    parser.add_argument("--each", action="store_true", help="print the error of each kernel")
    given = parser.parse_args()
    target = device(given.device)
    # Of trees that are learned anew, those of the package are no part, and may be out of date.
    packaged = rates_of if given.only_report else lambda each: rates_from(measured(each))
    rates = rates_from(load(given.record)) if given.record else packaged(target)
    samples = [each for path in given.results for each in _planned(path, target)]
    if given.only_report:
        times = predict(samples, target)(rates)
        errors = np.log(times / [each.microseconds for each in samples])
    else:
        found = fit(samples, rates, target, held=given.held)
        rates = replace(found.rates, fitted=_rounded(found.rates.fitted))
        errors = np.log(predict(samples, target)(rates) / [each.microseconds for each in samples])
    print("  ".join(f"{name} {value:.4g}" for name, value in asdict(rates.fitted).items()))
    beside = _beside(*given.beside) if given.beside else None
    judged = {"estimate": errors, **_learned(samples, errors, target, rates, given.trees, beside)}
    if given.each:
        for each, error in zip(samples, errors, strict=True):
            print(f"{error:+.3f} {each.microseconds:8.2f} {each.family:9} {each.spec} {each.tiles}")
    told = {name: report(samples, each) for name, each in judged.items()}
    for name, each in told.items():
        _print(name, each)
    if given.report:
        given.report.write_text(json.dumps({**told, "fitted": asdict(rates.fitted)}, indent=1))
    if given.out:
        given.out.write_text(replace(rates.measured, fitted=asdict(rates.fitted)).text())


def _rounded(fitted: Fitted) -> Fitted:
    return Fitted(**{name: float(f"{each:.4g}") for name, each in asdict(fitted).items()})


def _learned(
    samples: list[Sample],
    errors: np.ndarray,
    target: Device,
    rates: Rates,
    out: Path | None,
    beside: Rows | None,
) -> dict[str, np.ndarray]:
    """Errors with trees: new ones if they go to a file, else those of the package."""
    ours = without_eager(samples)
    some = [each for each, kept in zip(samples, ours, strict=True) if kept]
    rows = rows_of(some, target, rates)
    found: dict[str, np.ndarray] = {}
    trees = rates.trees
    if out:
        seen: Rows = (rows, -errors[ours])
        trees = grow(*(joined(seen, beside) if beside else seen), target)
        out.write_text(trees.text())
        found["workloads that trees did not see"] = errors.copy()
        found["workloads that trees did not see"][ours] += held_out(
            some, rows, -errors[ours], target, beside
        )
    if trees:
        found["with trees"] = errors.copy()
        found["with trees"][ours] += trees.sum(rows)
    return found


def _planned(path: Path, target: Device) -> list[Sample]:
    """Kernels of a file that plans may choose: rules that came later leave some out."""

    def legal(sample: Sample) -> bool:
        if sample.family == EAGER:
            return True
        return bool(read_kernel(sample.family, sample.tiles).legal(sample.shape, target))

    return [each for each in _read(path) if legal(each)]


def _beside(name: str, path: str) -> Rows:
    """Kernels of another device, by its own record."""
    target = device(name)
    rates = rates_from(measured(target))
    samples = [each for each in _planned(Path(path), target) if each.family != EAGER]
    times = np.log([each.microseconds for each in samples])
    return rows_of(samples, target, rates), times - np.log(predict(samples, target)(rates))


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


def _read(path: Path) -> Iterator[Sample]:
    """Samples of a file; what failed, was disturbed or was not measured is left out."""
    if path.suffix == ".jsonl":
        for each in read_measured([path]):
            given = each.candidate
            if each.microseconds and not each.disturbed:
                yield _sample(given.spec, given.family, dict(given.tiles), each.microseconds)
        return
    for row in json.loads(path.read_text())["rows"]:
        yield from _of_bench(row)


def _of_bench(row: dict[str, Any]) -> Iterator[Sample]:
    job, timing = row["job"], row["timing"]
    if job["spec"].startswith("conv") or timing["status"] != "ok":
        return
    family = _VARIANTS.get(job["variant"])
    if job["variant"] == "ours" and sum(_shape(job["spec"]).weight_bytes) >= _WIDE:
        family = "l2"
    if family is None or (job["l2"], job["protocol"]) != ("cold", "graph"):
        return
    try:
        tiles = {} if family == "eager" else _chosen(parse(job["spec"]), family)
    except RefusedError:
        return
    yield _sample(job["spec"], family, tiles, timing["microseconds"])


def _chosen(spec: Any, family: str) -> dict[str, Any]:
    """Tiles that the rule of a family chooses, as plans name them; refused where it has none."""
    sch, on = ir.Schedule(prim_func(spec)), device()
    chain = read_chain(sch)
    if family == "registers":
        return asdict(RegisterTiles().complete(sch, chain, on))
    if family == "dsm":
        return asdict(ClusterTiles().complete(sch, chain, on))
    if family == "gemm":
        return _given(TensorTiles().complete(sch, chain, on))
    tiles = TensorTiles()
    first, second = complete_pair(sch, chain, tiles, tiles, on, staged=family == "l2")
    return {"first": _given(first), "second": _given(second)}


def _given(tiles: TensorTiles) -> dict[str, Any]:
    return {name: getattr(tiles, name) for name in _TILES}


def _sample(text: str, family: str, tiles: dict[str, Any], microseconds: float) -> Sample:
    return Sample(text, _shape(text), family, tiles, microseconds)


def _shape(text: str) -> Shape:
    spec = parse(text)
    return shape_of(chain_of(spec), k_major=spec.weights == "nk")


def _print(name: str, told: dict[str, Any]) -> None:
    print(f"\n{name}")
    for family, found in told["families"].items():
        print(
            f"{family:10} {found['kernels']:4} kernels, bias {found['bias']:+.3f}, "
            f"spread {found['spread']:.3f}"
        )
    chains = told["chains"].values()
    for key in ("rank", "top1", "top3", "top8") if chains else ():
        values = [each[key] for each in chains]
        print(
            f"{key}: mean {np.mean(values):.3f}, worst "
            f"{min(values) if key == 'rank' else max(values):.3f}"
        )


if __name__ == "__main__":
    main()
