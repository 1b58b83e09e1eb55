"""The rule for chains whose intermediate stays in the cluster: what it makes and chooses."""

from __future__ import annotations

import json

import pytest
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from cpu.schedule.steps import assert_same
from crossfuse import _tvm as ir
from crossfuse.hardware import device
from crossfuse.schedule.install import install
from crossfuse.schedule.rules.chain import read_chain
from crossfuse.schedule.rules.cluster_tiles import ClusterTiles
from crossfuse.schedule.rules.clustered_ffn import schedule_clustered_ffn
from crossfuse.schedule.trace_json import trace_json
from crossfuse.workload import parse, prim_func, resolve

H100 = device("nvidia-h100")
FFN = "gated_ffn:M=100,K=64,N=256,L=64,dtype=bfloat16"


@pytest.mark.parametrize("passing", [{}, {"bulk": True}, {"ring": True, "bulk": True}], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("width", [256, 200])
def test_trace_replays_in_a_new_schedule(width: int, parts: int, passing: dict[str, bool]) -> None:
    func = prim_func(parse(FFN.replace("N=256", f"N={width}")))
    tiles = ClusterTiles(64, 2, parts)
    sch = schedule_clustered_ffn(func, tiles=tiles, constant_weights=True, **passing)
    again = Schedule(func)
    Trace.apply_json_to_schedule(json.loads(trace_json(sch.trace)), again)
    assert_same(again, sch)


#: Workload and the division that is chosen: rows, cluster size, parts.
CHOSEN = {
    "G1": (64, 8, 1),
    "G2": (64, 8, 1),
    "G3": (64, 8, 1),
    "G9": (64, 8, 4),
    "G10": (64, 8, 6),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_divisions_that_were_fastest_are_chosen(name: str) -> None:
    """On an H100 at M = 128, docs/hopper-measured.md."""
    install()
    sch = ir.Schedule(prim_func(resolve(name)))
    chosen = ClusterTiles().complete(sch, read_chain(sch), H100)
    assert (chosen.rows, chosen.cluster, chosen.parts) == CHOSEN[name]


def test_slices_in_ring_order_are_whole_steps() -> None:
    """Weights as [n, k] come in rows of 128 bytes; as [k, n] in rows of any number."""
    install()
    spec = parse("gemm_chain:M=64,K=64,N=384,L=64,dtype=bfloat16,weights=nk")
    chain = read_chain(ir.Schedule(prim_func(spec)))
    whole = ClusterTiles(64, 4, 1, multiple=64)
    assert (whole.width(chain), whole.pads(chain)) == (128, True)
    assert (ClusterTiles(64, 4, 1).width(chain), ClusterTiles(64, 4, 1).pads(chain)) == (96, False)
    sch = schedule_clustered_ffn(prim_func(spec), tiles=ClusterTiles(64, 4, 1), ring=True)
    *_, slices, step, _, _, depth = sch.get_loops(sch.get_sblock("gemm1"))
    assert [int(sch.get(each).extent) for each in (slices, step, depth)] == [4, 2, 64]
    plain = parse("gemm_chain:M=64,K=64,N=384,L=64,dtype=bfloat16")
    sch = schedule_clustered_ffn(prim_func(plain), tiles=ClusterTiles(64, 4, 1), ring=True)
    *_, slices, step, _, _, depth = sch.get_loops(sch.get_sblock("gemm1"))
    assert [int(sch.get(each).extent) for each in (slices, step, depth)] == [4, 3, 32]


def test_clusters_that_do_not_fit_at_once_take_turns() -> None:
    install()
    spec = parse("gemm_chain:M=2048,K=32,N=512,L=256,dtype=bfloat16")
    chain = read_chain(ir.Schedule(prim_func(spec)))
    alone, split = ClusterTiles(64, 8, 1), ClusterTiles(64, 8, 2)
    assert (alone.clusters(chain), alone.waves(chain, H100), alone.fits(chain, H100)) == (
        32,
        3,
        True,
    )
    assert not split.fits(chain, H100)  # its clusters wait for one another


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
    install()
    chain = read_chain(ir.Schedule(prim_func(parse(FFN.replace("gated_ffn", "gemm_chain")))))
    tiles = ClusterTiles(rows, cluster, parts)
    assert (tiles.fits(chain, H100), tiles.divides(chain)) == (fits, divides)


def test_what_divides_is_chosen_first() -> None:
    """Else slices reach beyond the widths, and the intermediate is zero there."""
    install()
    for width, pads in ((512, False), (520, True)):
        spec = parse(f"gemm_chain:M=128,K=416,N={width},L=256,dtype=bfloat16")
        sch = schedule_clustered_ffn(prim_func(spec))
        assert ("if_then_else" in str(sch.mod.script())) == pads
