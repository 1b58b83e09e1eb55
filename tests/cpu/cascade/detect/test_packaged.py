"""The packaged cascades are found in their plain functions, and say what these compute."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.cascade.detect.evaluate import assert_same
from cpu.cascade.small import SMALL, small
from crossfuse.cascade.detect import detect
from crossfuse.cascade.spec import Site
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import random_inputs

pytestmark = pytest.mark.cpu

#: Stages in order, with what they reduce; results and rows.
SOFTMAX = {"m": "max x", "s": "sum exp(-m + x)"}
MOMENTS = {"total": "sum x", "squares": "sum (x - total/N)**2"}
SCORE = "Piecewise((scores/2, i2 >= v_l), (-oo, True))"
SCALED = "17677669*scores/50000000"
ATTENTION = {
    "m": "max {0}",
    "s": "sum exp(-m + {0})",
    "o": "sum {1}*exp(-m + {0})",
}
DUE: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "R1": ({k: v.format(SCORE, "v") for k, v in ATTENTION.items()}, {"out": "o/s"}),
    "R2": ({k: v.format(SCALED, "v") for k, v in ATTENTION.items()}, {"out": "o/s"}),
    "R3": ({k: v.format(SCALED, "v") for k, v in ATTENTION.items()}, {"out": "o/s"}),
    "R4": ({k: v.format(SCALED, "cache") for k, v in ATTENTION.items()}, {"out": "o/s"}),
    "R5": (
        {"m": "max logits", "s": "sum exp(logits - m)", "top": "topk logits"},
        {"gates": "exp(-m + top)/s", "chosen": "top_index"},
    ),
    "R6": (
        {"magnitude": "max Abs(x)", "product": "sum 448*weight*x/Max(1/10000000000, magnitude)"},
        {"out": "product*weight_scale*Max(1/10000000000, magnitude)/448"},
    ),
    "R7": (SOFTMAX, {"y": "exp(-m + x)/s"}),
    "R8": (
        SOFTMAX | {"labelled": "sum Piecewise((x, Eq(labels, v_l)), (0, True))"},
        {"loss": "-labelled + m + log(s)"},
    ),
    "R9": (
        {"squares": "sum x**2", "product": "sum gamma*weight*x/sqrt(1/100000 + squares/N)"},
        {"out": "product"},
    ),
    "R10": (MOMENTS, {"y": "bias + weight*(x - total/N)/sqrt(1/100000 + squares/N)"}),
    "R11": (MOMENTS, {"variance": "squares/N"}),
    "R12": (
        {"total": "sum mass"}
        | {f"first_{r}": f"sum mass*{r}" for r in "xyz"}
        | {
            # z + (x + y): what is added first is printed where sympy has it.
            "inertia": "sum mass*((-first_z/total + z)**2"
            " + (-first_x/total + x)**2 + (-first_y/total + y)**2)"
        },
        {"inertia": "inertia"},
    ),
    "R13": (SOFTMAX, {"y": "-log(s) - m + x"}),
    "R14": (
        {"squares": "sum (residual + x)**2"},
        {"h": "residual + x", "y": "weight*(residual + x)/sqrt(1/100000 + squares/N)"},
    ),
}
CASTS = {"R1": "bfloat16", "R6": "float8_e4m3fn", "R9": "bfloat16", "R7": ""}


def only(name: str, dtype: str = "") -> Site:
    (site,) = detect(prim_func(small(name, dtype)))
    return site


@pytest.mark.parametrize("name", SMALL)
def test_stages_and_results(name: str) -> None:
    cascade = only(name).cascade
    stages, made = DUE[name]
    found = {each.name: f"{each.monoid.name} {each.term}" for each in cascade.stages}
    assert found == stages
    assert {key: str(each) for key, each in {**cascade.results, **cascade.rows}.items()} == made
    assert bool(cascade.rows) == (name in ("R7", "R10", "R13", "R14"))


@pytest.mark.parametrize("name", SMALL)
def test_every_stage_uses_earlier_ones_only(name: str) -> None:
    cascade = only(name).cascade
    known = {*cascade.elements, *cascade.invariants}
    for stage in cascade.stages:
        assert stage.term.free_symbols <= known
        known |= {stage.symbol} | ({stage.index_symbol} - {None})
    for term in (*cascade.results.values(), *cascade.rows.values()):
        assert term.free_symbols <= known


@pytest.mark.parametrize("name", SMALL)
def test_sites_say_what_functions_compute(name: str) -> None:
    site = only(name, "float32")
    inputs = random_inputs(small(name, "float32"), 5)
    # TVM rounds to 8 bits on the CPU, which the site leaves out.
    assert_same(site, inputs, rtol=0.1 if name == "R6" else 1e-4)


@pytest.mark.parametrize("name", CASTS)
def test_casts_between_results_and_uses_are_kept(name: str) -> None:
    found = [each.cast for each in only(name).cascade.stages if each.cast]
    assert found == ([CASTS[name]] if CASTS[name] else [])


def test_where_attention_stands() -> None:
    site = only("R3")
    batch, head, query = site.rows
    assert [site.extents[each] for each in (batch, head, query, site.axis)] == [2, 4, 1, 24]
    assert {name: len(each.columns) for name, each in site.stages.items()} == {
        "m": 0,
        "s": 0,
        "o": 1,
    }
    reads = {str(symbol): read for symbol, read in site.reads.items()}
    (column,) = site.stages["o"].columns
    due = (batch, f"{head.name} // 2", site.axis, column)
    assert [str(each) for each in reads["v"].indices] == [getattr(d, "name", d) for d in due]
    assert {str(key): block for key, block in site.producers.items()} == {"scores": "scores"}
    assert [each.dtype for each in site.stages.values()] == ["float32"] * 3
    (output,) = site.outputs
    assert output.columns == (column,)
    assert [str(each) for each in output.indices] == [
        each.name for each in (batch, head, query, column)
    ]


def test_where_the_routing_stands() -> None:
    site = only("R5")
    assert {name: each.columns for name, each in site.stages.items()} == {
        "m": (),
        "s": (),
        "top": (),
    }
    gates, chosen = site.outputs
    assert (gates.name, chosen.name) == ("gates", "chosen")
    assert [site.extents[each.columns[-1]] for each in (gates, chosen)] == [3, 3]
    assert site.cascade.stage("top").monoid.k == 3


def test_lengths_are_known() -> None:
    cascade = only("R11").cascade
    assert str(cascade.length) == "N"
    assert cascade.length in cascade.invariants
    assert int(only("R11").reads[cascade.length]) == 33
    assert only("R7").cascade.length is None


def test_index_is_known() -> None:
    cascade = only("R8").cascade
    assert cascade.index in cascade.elements
    assert cascade.index.is_integer and cascade.index.is_nonnegative
    assert only("R7").cascade.index is None


@pytest.mark.parametrize("name", ["R7", "R8", "R10"])
def test_large_functions_are_read_as_fast_as_small_ones(name: str) -> None:
    from crossfuse.workload import cascades

    (site,) = detect(prim_func(cascades.resolve(name)))
    assert np.prod([site.extents[each] for each in site.rows]) >= 4096


def test_masses_are_not_negative() -> None:
    site = only("R12")
    signs = {str(each): each.is_nonnegative for each in site.cascade.elements}
    assert signs == {"mass": True, "x": None, "y": None, "z": None}
