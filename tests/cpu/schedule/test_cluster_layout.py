"""`cluster_layout`: the values and the picture."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from itertools import product
from typing import Any

import pytest
from tvm.s_tir import Schedule

from cpu.schedule.kernels import matmul, mlp, scaled_matmul
from cpu.schedule.sampled import CASES, sampled
from cpu.schedule.steps import cluster_columns, split_reduction
from crossfuse.blocks.scheduled import ClusterLoop
from crossfuse.schedule.cluster_layout import ClusterLayout, Slabs


def shuffled(ranks: int, *, ring: bool = True, rows_on_y: bool = False) -> Any:
    sch = Schedule(mlp)
    consumer = sch.get_sblock("Y")
    loops = cluster_columns(sch, consumer, 4, ranks, part=1)
    if rows_on_y:
        sch.cluster_bind(loops["tile"], "y")
    at = loops["slice" if ring else "rank"]
    sch.dsm_shuffle(sch.get_sblock("H"), consumer, 0, at, ring=ring)
    return sch


def test_values_of_a_ring() -> None:
    sch = shuffled(4)
    instructions = len(sch.trace.insts)
    layout = sch.cluster_layout()
    assert len(sch.trace.insts) == instructions
    assert layout == ClusterLayout(
        axes=(("x", 4),),
        loops=(ClusterLoop("x", "ax1_0", 4), ClusterLoop("x", "j_0", 4)),
        buffers=(
            Slabs(
                name="H_shared.dsm",
                dtype="float32",
                axis="x",
                count=4,
                shape=(4, 4),
                size=64,
                writers=("H",),
                readers=("H_shared.dsm_shared.dyn",),
                exchange="ring",
            ),
        ),
    )
    assert layout.size == 4


def test_values_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        shuffled(4).cluster_layout().axes = ()


def test_writers_and_readers_after_decomposition() -> None:
    sch = Schedule(matmul)
    block = sch.get_sblock("C")
    partial = sch.dsm_reduce(block, split_reduction(sch, block, 4, 4))
    sch.decompose_reduction(partial, sch.get_loops(partial)[2])
    sch.decompose_reduction(block, sch.get_loops(block)[-1])
    (slabs,) = sch.cluster_layout().buffers
    assert slabs.writers == ("C_rf_init", "C_rf_update")
    assert slabs.readers == ("C_update",)
    assert slabs.exchange == "scatter"
    assert slabs.shape == (4, 8)


@pytest.mark.parametrize("case", CASES)
def test_exchange_of_each_primitive(case: str) -> None:
    (slabs,) = sampled(case).cluster_layout().buffers
    expected = "all-exchange" if case.startswith("exchange") else case
    assert slabs.exchange == expected


def test_without_clusters() -> None:
    layout = Schedule(scaled_matmul).cluster_layout()
    assert layout == ClusterLayout((), (), ())
    assert layout.size == 1
    assert layout.picture() == "no clusters"


RING = """\
cluster of 4 CTAs (x=4)

H_shared.dsm: 4 slabs of 4 x 4 float32, 64 bytes in a CTA
  made by H; taken by H_shared.dsm_shared.dyn
  ring: in step s, CTA r takes slab (r + s) mod 4

    CTA 0          CTA 1          CTA 2          CTA 3
  +--------+     +--------+     +--------+     +--------+
  | slab 0 | <-- | slab 1 | <-- | slab 2 | <-- | slab 3 |
  | 4 x 4  |     | 4 x 4  |     | 4 x 4  |     | 4 x 4  |
  +--------+     +--------+     +--------+     +--------+
     |______________________________________________^"""

GATHER = """\
cluster of 8 CTAs (x=4 x y=2)

H_shared.dsm: 4 slabs of 4 x 4 float32, 64 bytes in a CTA, one set along x for
  each place on the other axes
  made by H; taken by H_shared.dsm_shared.dyn
  all-gather: every CTA takes all 4 slabs in order

     x=0            x=1            x=2            x=3
  +--------+     +--------+     +--------+     +--------+
  | slab 0 | <-> | slab 1 | <-> | slab 2 | <-> | slab 3 |
  | 4 x 4  |     | 4 x 4  |     | 4 x 4  |     | 4 x 4  |
  +--------+     +--------+     +--------+     +--------+"""

SCATTER = """\
cluster of 8 CTAs (x=8)

C.rf_shared.dsm: 8 slabs of 4 x 8 float32, 128 bytes in a CTA
  made by C_rf; taken by C
  reduce-scatter: CTA r combines slice r of all 8 slabs

    CTA 0          CTA 1          CTA 2          CTA 3                  CTA 7
  +--------+     +--------+     +--------+     +--------+             +--------+
  | slab 0 | <-> | slab 1 | <-> | slab 2 | <-> | slab 3 | <-> ... <-> | slab 7 |
  | 4 x 8  |     | 4 x 8  |     | 4 x 8  |     | 4 x 8  |             | 4 x 8  |
  +--------+     +--------+     +--------+     +--------+             +--------+"""


def test_picture_of_a_ring() -> None:
    assert shuffled(4).cluster_layout().picture() == RING


def test_picture_of_two_axes() -> None:
    assert shuffled(4, ring=False, rows_on_y=True).cluster_layout().picture() == GATHER


def test_picture_of_a_reduction_leaves_out_the_middle() -> None:
    sch = Schedule(matmul)
    block = sch.get_sblock("C")
    sch.dsm_reduce(block, split_reduction(sch, block, 4, 8))
    assert sch.cluster_layout().picture() == SCATTER


def test_picture_of_one_cta() -> None:
    picture = shuffled(1).cluster_layout().picture()
    assert "one CTA, so nothing is exchanged" in picture
    assert "1 slab of" in picture


@pytest.mark.parametrize("exchange", ["scatter", "all-exchange", "ring", "all-gather", ""])
def test_pictures_fit_80_columns(exchange: str) -> None:
    name = "gemm0_gate.rf_shared.dsm"
    for count, shape in product(range(1, 17), [(1,), (128, 64), (4096, 4096, 128, 1024, 3072)]):
        slabs = Slabs(name, "bfloat16", "x", count, shape, 2, (), (), exchange)
        layout = ClusterLayout((("x", count),), (), (slabs,))
        for drawn in (layout, replace(layout, axes=(("x", count), ("y", 1)))):
            lines = drawn.picture().splitlines()
            assert max(map(len, lines)) <= 80
            assert f"slab {count - 1} " in drawn.picture()
            assert not any(line != line.rstrip() for line in lines)
