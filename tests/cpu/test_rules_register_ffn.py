"""The rule for chains whose intermediate stays in registers: what it makes and chooses."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from cpu.schedule.steps import assert_same
from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_chain
from crossfuse.hardware import device
from crossfuse.planner.kernels.shape import shape_of_blocks
from crossfuse.planner.plan import plan
from crossfuse.schedule.planned import trace_json
from crossfuse.schedule.rules.parted_ffn import RegisterTiles, schedule_register_ffn
from crossfuse.workload import parse, prim_func, resolve

H100 = device("nvidia-h100")
FFN = "gated_ffn:M=100,K=64,N=256,L=64,dtype=bfloat16"


@pytest.mark.parametrize(("parts", "cluster"), [(2, 1), (4, 1), (2, 2), (4, 4)])
def test_trace_replays_in_a_new_schedule(parts: int, cluster: int) -> None:
    func = prim_func(parse(FFN))
    sch = schedule_register_ffn(
        func, tiles=RegisterTiles(64, 32, parts, cluster), constant_weights=True
    )
    again = Schedule(func)
    Trace.apply_json_to_schedule(json.loads(trace_json(sch.trace)), again)
    assert_same(again, sch)


@pytest.mark.parametrize("name", ["G1", "G2", "G3", "G4", "G7", "G9", "G10"])
def test_a_division_that_fits_is_chosen(name: str) -> None:
    found, chain = chosen(f"{name}:M=128")
    assert fits_on_h100(found, chain)
    # Sums and what is made of them leave registers for the epilogue.
    width = chain.n // found.parts
    assert len(chain.first) * width // 2 + width // 4 <= 160
    best = plan(f"{name}:M=128", only=("registers",))
    if len(chain.first) * chain.n / 2 + chain.n / 4 <= 160 * best.tiles["parts"]:
        assert asdict(found) == {**best.tiles, "stages": 0}
    else:
        assert found.parts > best.tiles["parts"]


@pytest.mark.parametrize(
    "given",
    [{"cluster": 1}, {"cluster": 4}, {"parts": 8}, {"rows": 128}, {"columns": 72, "cluster": 4}],
    ids=str,
)
def test_what_is_given_is_kept(given: dict[str, int]) -> None:
    found, chain = chosen("G1", **given)
    assert {name: getattr(found, name) for name in given} == given
    assert fits_on_h100(found, chain)
    assert found.cluster in (1, found.parts)


def fits_on_h100(tiles: RegisterTiles, chain: Chain) -> bool:
    return bool(tiles.kernel.legal(shape_of_blocks(chain), H100))


def chosen(name: str, **given: int) -> tuple[RegisterTiles, Chain]:
    sch = ir.Schedule(prim_func(resolve(name)))
    chain = read_chain(sch)
    return RegisterTiles(**given).complete(sch, chain, H100), chain


@pytest.mark.parametrize(
    ("rows", "columns", "parts", "fits"),
    [
        (64, 64, 1, True),
        (64, 64, 2, True),
        (64, 64, 3, False),  # parts of 128 columns: the last one has none
        (64, 64, 8, False),  # parts of 64 columns: four have none
        (64, 60, 1, False),  # no whole groups of 8 columns
        (64, 48, 1, True),  # the last tile reaches beyond the output
        (64, 48, 2, True),
        (64, 264, 1, False),
    ],
)
def test_what_fits(rows: int, columns: int, parts: int, fits: bool) -> None:
    chain = read_chain(ir.Schedule(prim_func(parse(FFN.replace("gated_ffn", "gemm_chain")))))
    assert fits_on_h100(RegisterTiles(rows, columns, parts, 1), chain) == fits


@pytest.mark.parametrize(
    ("m", "columns", "parts", "cluster", "fits"),
    [
        (128, 64, 2, 2, True),
        (100, 64, 4, 4, True),  # the last rows of a tile are masked
        (100, 48, 4, 4, True),  # and so are columns
        (128, 64, 4, 2, False),  # parts in several clusters
        (10, 64, 4, 4, True),  # three rows for each, one for the last
        (1, 64, 4, 4, True),  # equal parts of the only one
    ],
)
def test_what_fits_a_cluster(m: int, columns: int, parts: int, cluster: int, fits: bool) -> None:
    spec = parse(f"gemm_chain:M={m},K=64,N=256,L=64,dtype=bfloat16")
    chain = read_chain(ir.Schedule(prim_func(spec)))
    assert fits_on_h100(RegisterTiles(64, columns, parts, cluster), chain) == fits


def test_ctas_that_wait_for_sums_run_at_once() -> None:
    spec = parse("gemm_chain:M=8192,K=64,N=256,L=64,dtype=bfloat16")
    chain = read_chain(ir.Schedule(prim_func(spec)))
    assert RegisterTiles(64, 32, 1, 1).kernel.tile_count(shape_of_blocks(chain)) == 256
    assert fits_on_h100(RegisterTiles(64, 32, 1, 1), chain)
    assert not fits_on_h100(RegisterTiles(64, 32, 2, 1), chain)
