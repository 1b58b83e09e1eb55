"""What the planner says of streams of functions, and that it compiles and is right."""

from __future__ import annotations

import pytest

from cpu.cascade.rewrite.cases import CASES, assert_close, inputs, scheduled, site_of
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.rewrite.work import Work, work_of
from crossfuse.emulate.cuda import emulate
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.planner.cascade.shape import cascade_shape
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families.registry import cascade_families
from crossfuse.runtime.nvcc import compile_cubin

#: What is counted of packaged cascades.
COUNTED = {
    ("softmax", "bfloat16", 32768): Work(
        64,
        32768,
        8,
        2,
        2,
        0,
        2,
        fetched=16,
        swept=4,
        held=4,
        emitted=4,
        unpacked=True,
        reused=8,
        spared=1,
        slots=2,
        exponentials=2,
        operations=5,
    ),
    # Scales and shifts are no rows' own: they come from L2, but take registers.
    ("layer_norm", "bfloat16", 8192): Work(
        64,
        8192,
        8,
        2,
        2,
        0,
        2,
        fetched=16,
        swept=4,
        held=4,
        emitted=12,
        unpacked=True,
        slots=4,
        operations=10,
    ),
    ("cross_entropy", "float16", 100): Work(
        64, 100, 4, 2, fetched=8, swept=4, slots=3, exponentials=1, operations=4
    ),
    ("variance", "float32", 33): Work(64, 33, 1, 4, fetched=4, swept=1, slots=4, operations=7),
    ("inertia", "float32", 4096): Work(
        64, 4096, 4, 16, fetched=64, swept=16, slots=9, operations=27
    ),
}


def best(name: str, rows: int, length: int, dtype: str = "float32") -> StreamTiles:
    site = site_of(name, rows, length, dtype)
    target = device("nvidia-h100")
    (family,) = cascade_families(cascade_shape(site, derive(site.cascade)))
    _, found = family.in_order(target, rates_of(target))
    assert isinstance(found[0], StreamTiles)
    return found[0]


@pytest.mark.parametrize(("name", "dtype", "length"), COUNTED)
def test_work(name: str, dtype: str, length: int) -> None:
    site = site_of(name, 64, length, dtype)
    assert work_of(site, derive(site.cascade)) == COUNTED[name, dtype, length]


@pytest.mark.parametrize(
    ("name", "rows", "length"),
    [("softmax", 4096, 32768), ("cross_entropy", 4096, 128256), ("layer_norm", 8, 32768)],
)
def test_the_best_compiles_without_spills(name: str, rows: int, length: int) -> None:
    tiles = best(name, rows, length, "bfloat16")
    (usage,) = compile_cubin(
        lower(scheduled(name, rows, length, tiles, "bfloat16")).image.cuda
    ).resources
    assert usage.complaints == ()


@pytest.mark.parametrize(
    ("name", "rows", "length"),
    [("softmax", 48, 100), ("layer_norm", 6, 37), ("variance", 2, 3000), ("cross_entropy", 5, 1)],
)
def test_the_best_is_right(name: str, rows: int, length: int) -> None:
    tiles = best(name, rows, length)
    assert (tiles.rows > 1) == (length < 128 and rows > 5), tiles
    arrays = inputs(name, rows, length)
    report = emulate(lower(scheduled(name, rows, length, tiles)).image, arrays, orders=1)
    assert report.ok, "\n".join(map(str, report.findings))
    assert_close(report.outputs[CASES[name].output], name, arrays)
