"""Workloads of any number of rows with further inputs, and tiles of the rules for tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hypothesis import strategies as st

from cpu.fuzz.layouts import rarely
from crossfuse.planner.families.registry import FAMILIES
from crossfuse.workload import WorkloadSpec, parse, prim_func

_ROWS = (1, 7, 33, 63, 65, 123, 125, 127, 129)


@dataclass(frozen=True)
class TilePlan:
    """A workload, a family of kernels and its tiles, as plans name them."""

    text: str
    family: str
    tiles: dict[str, Any]

    @cached_property
    def spec(self) -> WorkloadSpec:
        return parse(self.text)

    def build(self) -> Any:
        func = prim_func(self.spec)
        family = FAMILIES[self.family]
        return family.schedule(func, self.tiles, "nvidia-h100")


@st.composite
def tile_plans(draw: st.DrawFn) -> TilePlan:
    """Mostly plans that fit together."""
    family = draw(st.sampled_from(["gemm", "registers", "dsm", "dsm", "l2", "global"]))
    text = draw(_specs(family))
    tiles: dict[str, Any] = draw({"registers": _kept, "dsm": _clustered}.get(family, _tiled)())
    if family in ("l2", "global"):
        split = draw(st.sampled_from([1, 2, 4]))
        first = {**tiles, "split": 1, "cluster": split, "stacked": False}
        columns = draw(st.sampled_from([16, 32, 40, 64]))
        second = {"rows": tiles["rows"], "columns": columns, "cluster": 1, "split": split}
        tiles = {"first": first, "second": second}
    return TilePlan(text, family, tiles)


@st.composite
def _specs(draw: st.DrawFn, family: str) -> str:
    rows = draw(st.sampled_from(_ROWS) | st.integers(1, 200))
    kind = "gemm" if family == "gemm" else draw(st.sampled_from(["gated_ffn", "gemm_chain"]))
    reduction = 64 * draw(st.integers(1, 4)) if kind == "gemm" else draw(_extents(128))
    between = draw(_extents(512)) if rarely(draw, 3) else 64 * draw(st.integers(2, 8))
    places = ["", "last"] if kind == "gemm" else ["", "first", "last", "first+last"]
    words = [
        f"{kind}:M={rows},K={reduction}",
        f"N={between if kind != 'gemm' else draw(_extents(128))}",
        *([] if kind == "gemm" else [f"L={draw(_extents(128))}"]),
        f"dtype={draw(st.sampled_from(['bfloat16', 'float16']))}",
        f"weights={draw(st.sampled_from(['kn', 'nk']))}",
        *(
            f"act={each}"
            for each in [draw(st.sampled_from(["", "relu"]))]
            if each and kind != "gated_ffn"
        ),
        *(f"{key}={at}" for key in ("scale", "bias") if (at := draw(st.sampled_from(places)))),
        *draw(st.sampled_from([[], ["residual=out"], ["residual=out"], ["out=float32"]])),
    ]
    return ",".join(words)


def _extents(most: int) -> st.SearchStrategy[int]:
    return st.integers(1, most // 8).map(lambda count: 8 * count)


@st.composite
def _kept(draw: st.DrawFn) -> dict[str, int]:
    parts = draw(st.sampled_from([1, 2, 3, 4, 4, 8]))
    return {
        "rows": draw(st.sampled_from([64, 128])),
        "columns": draw(st.sampled_from([16, 24, 32, 64, 96, 128])),
        "parts": parts,
        "cluster": draw(st.sampled_from([1, parts])),
    }


@st.composite
def _clustered(draw: st.DrawFn) -> dict[str, int]:
    return {
        "rows": draw(st.sampled_from([64, 128])),
        "cluster": draw(st.sampled_from([2, 2, 3, 4, 4, 8])),
        "parts": draw(st.sampled_from([1, 2, 2, 3, 4, 4])),
    }


@st.composite
def _tiled(draw: st.DrawFn) -> dict[str, int]:
    return {
        "rows": draw(st.sampled_from([64, 128])),
        "columns": draw(st.sampled_from([16, 24, 32, 40, 64, 96])),
        "cluster": 1,
        "split": draw(st.sampled_from([1, 2, 2, 3, 4])),
    }
