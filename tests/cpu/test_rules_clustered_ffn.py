"""The rule for chains whose intermediate stays in the cluster: what it makes and chooses."""

from __future__ import annotations

import json

import pytest
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from cpu.schedule.steps import assert_same
from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_chain
from crossfuse.errors import ScheduleRefused
from crossfuse.hardware import device
from crossfuse.planner.kernels.shape import shape_of_blocks
from crossfuse.planner.plan import plan
from crossfuse.schedule.planned import trace_json
from crossfuse.schedule.rules.parted_ffn import ClusterTiles, schedule_clustered_ffn
from crossfuse.workload import parse, prim_func, resolve

H100 = device("nvidia-h100")
FFN = "gated_ffn:M=100,K=64,N=256,L=64,dtype=bfloat16"


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("width", [256, 200])
def test_trace_replays_in_a_new_schedule(width: int, parts: int) -> None:
    func = prim_func(parse(FFN.replace("N=256", f"N={width}")))
    tiles = ClusterTiles(64, 2, parts)
    sch = schedule_clustered_ffn(func, tiles=tiles, constant_weights=True)
    again = Schedule(func)
    Trace.apply_json_to_schedule(json.loads(trace_json(sch.trace)), again)
    assert_same(again, sch)


@pytest.mark.parametrize("name", ["G1", "G2", "G3", "G9", "G10", "S8", "G1:M=16,weights=nk"])
def test_what_is_left_open_is_what_is_planned(name: str) -> None:
    found = chosen(name)
    assert {
        "rows": found.rows,
        "cluster": found.cluster,
        "parts": found.parts,
    } == plan(name, only=("dsm",)).tiles


@pytest.mark.parametrize(
    "given",
    [{"cluster": 4}, {"cluster": 3}, {"parts": 2}, {"rows": 128}, {"rows": 128, "cluster": 2}],
    ids=str,
)
def test_what_is_given_is_kept(given: dict[str, int]) -> None:
    found = chosen("G10", **given)
    assert {name: getattr(found, name) for name in given} == given
    assert fits_on_h100(found, read_chain(ir.Schedule(prim_func(resolve("G10")))))


def test_clusters_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ScheduleRefused, match="cluster-tiles: block 'gemm1': found 512 columns of"):
        chosen("G1", cluster=32)


def fits_on_h100(tiles: ClusterTiles, chain: Chain) -> bool:
    return bool(tiles.kernel.legal(shape_of_blocks(chain), H100))


def chosen(name: str, **given: int) -> ClusterTiles:
    sch = ir.Schedule(prim_func(resolve(name)))
    return ClusterTiles(**given).complete(sch, read_chain(sch), H100)


def test_clusters_that_do_not_fit_at_once_take_turns() -> None:
    spec = parse("gemm_chain:M=2048,K=32,N=512,L=256,dtype=bfloat16")
    chain = read_chain(ir.Schedule(prim_func(spec)))
    alone, split = ClusterTiles(64, 8, 1), ClusterTiles(64, 8, 2)
    assert alone.kernel.tile_count(shape_of_blocks(chain)) == 32 > 2 * H100.resident_clusters(8)
    assert fits_on_h100(alone, chain)
    assert not fits_on_h100(split, chain)  # its clusters wait for one another


@pytest.mark.parametrize(
    ("rows", "cluster", "parts", "fits", "divides"),
    [
        (64, 4, 1, True, True),
        (64, 4, 2, True, True),
        (64, 3, 1, True, False),  # slices of 128 columns
        (64, 16, 2, False, False),  # slices of 16 columns: the second part has none
        (64, 1, 2, True, True),
        (64, 1, 1, True, True),
        (64, 2, 16, False, False),
    ],
)
def test_what_fits(rows: int, cluster: int, parts: int, fits: bool, divides: bool) -> None:
    chain = read_chain(ir.Schedule(prim_func(parse(FFN.replace("gated_ffn", "gemm_chain")))))
    tiles = ClusterTiles(rows, cluster, parts)
    assert fits_on_h100(tiles, chain) == fits
    assert bool(tiles.kernel.divides(shape_of_blocks(chain))) == divides


def test_slices_beyond_a_width_are_zero() -> None:
    """The columns of 520 are no multiple of what a cluster of any size makes."""
    for width, pads in ((512, False), (520, True)):
        spec = parse(f"gemm_chain:M=128,K=416,N={width},L=256,dtype=bfloat16")
        sch = schedule_clustered_ffn(prim_func(spec), tiles=ClusterTiles(64, 8, 1))
        assert ("if_then_else" in str(sch.mod.script())) == pads
