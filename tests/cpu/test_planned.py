"""Plans become kernels: rules take their tiles, and grids and shared memory are as planned."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from crossfuse.errors import LoweringRefused, RefusedError, ScheduleRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.planner.families.registry import FAMILIES, families, read_kernel
from crossfuse.planner.kernels.shape import count, select
from crossfuse.planner.plan import Plan, plan
from crossfuse.schedule.planned import schedule_planned
from crossfuse.workload import prim_func, resolve
from null.planner.test_kernels import shape

H100 = device("nvidia-h100")
SPECS = (
    "G4",
    "G7:M=16",
    "G6:M=512",
    "S8:M=256",
    "S4:M=16",
    "G1:weights=nk",
    "gemm:M=256,K=768,N=3072",
)
#: No tiles of these fit. Told here, because counting all tiles would slow the collection of tests.
EMPTY = (
    ("G6:M=512", "dsm"),
    ("S8:M=256", "dsm"),
    ("S8:M=256", "registers"),
    ("S4:M=16", "registers"),
)
CASES = [
    (text, each.name)
    for text in SPECS
    for each in families(shape(text))
    if (text, each.name) not in EMPTY
]


@cache
def base(text: str) -> Plan:
    return plan(resolve(text), only=("eager",))


@pytest.mark.parametrize(("text", "family"), EMPTY)
def test_families_of_which_no_tiles_fit(text: str, family: str) -> None:
    assert count(FAMILIES[family].every(shape(text), H100)) == 0


@pytest.mark.parametrize(("text", "family"), CASES)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]
)
def test_kernels_are_what_the_planner_counts(text: str, family: str, seed: int) -> None:
    of = shape(text)
    kernels = FAMILIES[family].every(of, H100)
    kernel = select(kernels, int(np.random.default_rng(seed).integers(count(kernels))))
    given = replace(base(text), family=family, tiles=kernel.tiles())
    found = lower(schedule_planned(prim_func(resolve(text)), given, constant_weights=True))
    wanted = kernel.resources(of, H100)
    launches = found.image.launches
    assert len(launches) == len(wanted)
    for launch, each in zip(launches, wanted, strict=True):
        assert launch.grid[0] == each.ctas
        assert launch.cluster[0] == each.cluster
        assert launch.block[0] == each.threads
        assert launch.dynamic_shared_bytes == each.shared_bytes


@pytest.mark.parametrize(
    ("text", "family", "tiles"),
    [
        ("G4", "registers", {"rows": 64, "columns": 256, "parts": 8, "cluster": 8}),
        ("G4", "dsm", {"rows": 128, "cluster": 16, "parts": 12}),
        ("S3", "dsm", {"rows": 128, "cluster": 16, "parts": 1}),
        (
            "S3",
            "l2",
            {
                "first": {"rows": 128, "columns": 136, "cluster": 2, "split": 1, "across": 1}
                | {"stacked": False},
                "second": {"rows": 128, "columns": 128, "cluster": 1, "split": 2},
            },
        ),
        (
            "S3",
            "l2",
            {
                "first": {"rows": 128, "columns": 128, "cluster": 2, "split": 1, "across": 1}
                | {"stacked": False},
                "second": {"rows": 128, "columns": 32, "cluster": 1, "split": 2},
            },
        ),
    ],
)
def test_what_the_planner_rules_out_the_rules_refuse(
    text: str, family: str, tiles: dict[str, object]
) -> None:
    assert not read_kernel(family, tiles).legal(shape(text), H100)
    given = replace(base(text), family=family, tiles=tiles)
    with pytest.raises((ScheduleRefused, LoweringRefused)):
        lower(schedule_planned(prim_func(resolve(text)), given))


def test_a_plan_not_to_fuse_has_no_schedule() -> None:
    with pytest.raises(RefusedError, match="leaves the chain to a library"):
        schedule_planned(prim_func(resolve("G4")), base("G4"))
