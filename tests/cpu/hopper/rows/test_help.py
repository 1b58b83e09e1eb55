"""Rows that a CTA makes for others which have not started: right whoever runs when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from cpu.hopper.rows.products import of_spec, quantised, scheduled, spec
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate.cuda import EmulationReport, drop_call, emulate
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import check, random_inputs
from crossfuse.workload.cascade_spec import CascadeSpec

pytestmark = pytest.mark.cpu

ARRIVE = "tvm_builtin_ptx_mbarrier_arrive_nocount_arrive_shared_b64"

#: Clusters of one and two CTAs, tiles with rows that there are not, scales beside the rows.
CASES: dict[str, tuple[CascadeSpec, dict[str, int]]] = {
    "one CTA": (spec(3, 128, 48), {"rows": 64, "columns": 16}),
    "two tiles of rows": (spec(66, 64, 528), {"rows": 64, "columns": 16}),
    "several rows each": (spec(40, 128, 48), {"rows": 64, "columns": 16}),
    "weights shared": (spec(4, 128, 64), {"rows": 64, "columns": 32, "cluster": 2}),
    "three warpgroups": (spec(5, 128, 32), {"rows": 192, "columns": 16}),
    "scales": (quantised(3, 80, 48), {"rows": 64, "columns": 16}),
    "weights held back": (spec(8, 1024, 384), {"rows": 128, "columns": 192, "cluster": 2}),
}


@cache
def kernel(case: str) -> KernelImage:
    given, tiles = CASES[case]
    stream = None
    if case == "several rows each":
        stream = StreamTiles(threads=128, unroll=1, resident="registers")
    return lower(scheduled(prim_func(given), stream, constant=True, **tiles)).image


def run(case: str, image: KernelImage, orders: int = 2) -> EmulationReport:
    return emulate(image, random_inputs(CASES[case][0], 2), orders=orders, max_findings=16)


@pytest.mark.parametrize("case", CASES)
def test_clusters_run_together_and_one_after_another(case: str) -> None:
    """In every other order a cluster is over before the next one starts; flags count on."""
    (launch,) = kernel(case).launches
    assert launch.helps and not launch.cooperative
    assert launch.grid[0] > launch.cluster_size
    report = run(case, kernel(case), orders=4)
    report.raise_if_wrong()
    given = CASES[case][0]
    check(given, random_inputs(given, 2), report.outputs)


def test_the_next_launch_may_begin_before_this_one_is_over() -> None:
    image = kernel("weights shared")
    assert image.launches[0].early
    run("weights shared", replace(image, launches=image.launches * 2)).raise_if_wrong()


FAULTS: dict[str, tuple[Callable[[KernelImage], KernelImage], str, str]] = {
    "nobody asks for help": (
        lambda image: drop_call(image, "crossfuse_watch", 0),
        "deadlock",
        "polls the flag",
    ),
    "nobody says that help is done": (
        lambda image: drop_call(image, ARRIVE, 1),
        "deadlock",
        "lacks 1 arrivals",
    ),
    "nobody is called": (
        lambda image: edited(image, "      crossfuse_await_help(called, done);\n", ""),
        "uninitialised-read",
        "normalised",
    ),
    "copies are not fenced": (
        lambda image: edited(image, 'asm volatile("fence.proxy.async.global;" ::: "memory");', ""),
        "async-race",
        "normalised",
    ),
}


def edited(image: KernelImage, old: str, new: str) -> KernelImage:
    assert old in image.cuda
    return replace(image, cuda=image.cuda.replace(old, new))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    make, kind, place = FAULTS[name]
    found = [str(each) for each in run("weights shared", make(kernel("weights shared"))).findings]
    assert any(each.split(" ")[0] in kind.split("|") and place in each for each in found), found


def test_help_that_is_asked_for_in_vain_is_none() -> None:
    """Nobody says in time that rows are there; who loads has seen them, and calls nobody."""
    untold = drop_call(kernel("weights shared"), ARRIVE, 0)
    run("weights shared", untold, orders=4).raise_if_wrong()


def test_what_is_missing_is_found_where_clusters_are_alone() -> None:
    """All of them together need no help."""
    wrong = drop_call(kernel("one CTA"), "crossfuse_watch", 0)
    assert run("one CTA", wrong, orders=1).ok
    assert not run("one CTA", wrong).ok


def test_ctas_of_several_tiles_need_all_others() -> None:
    """Their second tile may be late when nobody's hands are free."""
    given = spec(40, 64, 16 * 140)
    (launch,) = lower(of_spec(given, rows=64, columns=16)).image.launches
    assert launch.cooperative and not launch.helps
