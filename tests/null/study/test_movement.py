"""All levels together, on the workloads of the suites."""

from __future__ import annotations

import numpy as np
import pytest

from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.planner.chain.build import Layer, Operand, Reduced, assemble, chain_of, matrix_chain
from crossfuse.planner.chain.spec import Chain, Reduction
from crossfuse.planner.kernels.shape import Count
from crossfuse.workload import lookup, parse
from null.study.chains import compulsory, random_case
from study.dataflow.movement import Machine, movement
from study.dataflow.placement import accumulators, gathered
from study.dataflow.schedules import Residency, check_residency, kept, read_schedule
from study.dataflow.tiling import Tiling, check_tiling, grains
from study.dataflow.volume import Nest, nests, region_elements

H100 = Machine(device("nvidia-h100").l2_bytes)
G4 = matrix_chain(128, [768, 3072, 768])
TILES = Tiling({"m": 128, "n": 128, "k": 64, "l": 96}, {"n": 8, "l": 8})


@pytest.mark.parametrize(
    ("name", "mebibytes"), [("G1", 0.35), ("G4", 9.4), ("G5", 258), ("S3", 260), ("S8", 18.5)]
)
def test_hbm_moves_what_must_be_when_clusters_walk_in_step(name: str, mebibytes: float) -> None:
    chain = chain_of(lookup(name))
    schedule = read_schedule("m n | l k", chain)
    found = movement(chain, schedule, TILES, kept(chain, schedule), H100)
    assert found.total("hbm") == compulsory(chain)
    assert found.total("hbm") / 2**20 == pytest.approx(mebibytes, rel=0.02)


def test_a_convolution_reads_its_image_once_from_hbm_and_its_windows_from_l2() -> None:
    chain = chain_of(parse("conv_chain:batch=1,H=56,W=56,IC=64,OC1=64,OC2=256,k1=3"))
    schedule = read_schedule("m | n l k", chain)
    tiling = Tiling({"m": 128, "n": 64, "k": 64, "l": 256}, {})
    found = movement(chain, schedule, tiling, kept(chain, schedule), H100)
    assert found.bytes["hbm"]["A"] == 56 * 56 * 64 * 2
    assert found.bytes["l2"]["A"] == 56 * 56 * 64 * 9 * 2


def test_a_cluster_that_covers_the_intermediate() -> None:
    """G4 in 3 clusters of 8 CTAs along n: C goes to all peers, E is added in L2 by 3 clusters."""
    schedule = read_schedule("m n l | k", G4)
    found = movement(G4, schedule, TILES, kept(G4, schedule), H100)
    assert found.bytes["dsm"] == {"C": 7 * 128 * 3072 * 2, "E": 0}
    assert found.bytes["l2"] == {
        "A": 3 * 128 * 768 * 2,  # multicast: once for each cluster
        "B": 3072 * 768 * 2,
        "C": 0,
        "D": 3072 * 768 * 2,
        "E": 3 * 128 * 768 * 4,
    }
    assert found.bytes["shared"] == {
        "A": 24 * 128 * 768 * 2,
        "B": 3072 * 768 * 2,
        "C": 8 * 128 * 3072 * 2,
        "D": 3072 * 768 * 2,
    }
    # Instructions of 64 rows: every weight is read twice, A once for each 128 columns.
    assert found.bytes["registers"] == {
        "A": 24 * 128 * 768 * 2,
        "B": 2 * 3072 * 768 * 2,
        "C": 8 * 128 * 3072 * 2,
        "D": 2 * 3072 * 768 * 2,
    }


def test_an_epilogue_reads_once_for_each_sum_that_is_whole() -> None:
    """G4 with biases and a residual: E leaves in parts for each n, and is finished once."""
    text = "gemm_chain:M=1536,K=768,N=3072,L=768,bias=first+last,scale=first,residual=in"
    chain, plain = chain_of(parse(text)), matrix_chain(1536, [768, 3072, 768])
    assert chain.products[0].further == ("C_0", "C_1")
    assert chain.products[1].further == ("E_0", "E_1")
    assert chain.tensor("C_0").dims == () and chain.tensor("E_1").dims == ("m", "l")
    tiling = Tiling({"m": 128, "n": 128, "k": 64, "l": 96}, {})
    for order in ("m | n l k", "m | l n k"):
        schedule = read_schedule(order, chain)
        found = movement(chain, schedule, tiling, kept(chain, schedule), H100)
        without = movement(plain, schedule, tiling, kept(plain, schedule), H100)
        # A CTA has 128 of 1536 rows, so that there are twelve that read a bias.
        by_cta = {"C_0": 4 * 12, "C_1": 3072 * 2 * 12, "E_0": 768 * 2 * 12, "E_1": 1536 * 768 * 2}
        assert found.bytes["l2"] == {**without.bytes["l2"], **by_cta}
        in_memory = {"C_0": 4, "C_1": 3072 * 2, "E_0": 768 * 2, "E_1": 1536 * 768 * 2}
        assert found.bytes["hbm"] == {**without.bytes["hbm"], **in_memory}
        for level in ("registers", "shared", "dsm"):
            assert found.bytes[level] == without.bytes[level]


def test_reductions_between_products_are_not_analysed() -> None:
    layers = [
        Layer(512, (Operand(2),), 2, reduced=(Reduced("most", "max", ("column",)),)),
        Layer(64, (Operand(2),), 2),
    ]
    chain = assemble(512, 64, Operand(2), layers)
    assert chain.reductions == (Reduction("most", "C", "max", ("n",)),)
    schedule = read_schedule("m | n l k", chain)
    with pytest.raises(PlanRefused) as caught:
        movement(chain, schedule, TILES, kept(chain, schedule), H100)
    assert str(caught.value) == (
        "chain: reduction 'most': found the max of C over n; limit: products and element-wise "
        "functions between them, which is what volumes are known of. Instead: plan the products "
        "on either side as chains of their own."
    )


def test_an_intermediate_in_l2_is_written_and_read_and_has_no_exchange() -> None:
    schedule = read_schedule("m n l | k", G4)
    wide = Residency({"C": 0}, frozenset({"C"}))
    tiling = Tiling({"m": 128, "n": 128, "k": 64, "l": 96}, {})
    check_residency(G4, schedule, wide)
    found = movement(G4, schedule, tiling, wide, H100)
    size = 128 * 3072 * 2
    assert found.bytes["l2"]["C"] == size + 8 * size  # eight CTAs along l read it
    assert found.bytes["dsm"] == {"C": 0, "E": 0}
    assert found.bytes["hbm"]["C"] == 0
    assert movement(G4, schedule, tiling, wide, Machine(2**20)).bytes["hbm"]["C"] == 2 * size


def test_a_small_l2_is_refilled() -> None:
    """Each step of m reads the weights again: 12 times, unless they stay in L2."""
    chain = matrix_chain(1536, [768, 3072, 768])
    schedule = read_schedule("l | m n k", chain)
    tiling = Tiling({"m": 128, "n": 128, "k": 64, "l": 128}, {})
    residency = kept(chain, schedule)
    large = movement(chain, schedule, tiling, residency, Machine(50 << 20))
    small = movement(chain, schedule, tiling, residency, Machine(4 << 20))
    assert large.bytes["hbm"]["B"] == 3072 * 768 * 2
    assert small.bytes["hbm"]["B"] == 12 * 3072 * 768 * 2
    assert small.bytes["l2"] == large.bytes["l2"]


def test_partial_sums_are_read_back_where_nobody_adds() -> None:
    schedule = read_schedule("m | n l k", G4)
    tiling = Tiling({"m": 128, "n": 128, "k": 64, "l": 96}, {})
    residency = kept(G4, schedule)
    adds = movement(G4, schedule, tiling, residency, H100).bytes["l2"]["E"]
    reads = movement(G4, schedule, tiling, residency, Machine(H100.l2_bytes, adds=False))
    assert adds == 24 * 128 * 768 * 4
    assert reads.bytes["l2"]["E"] == (24 + 23) * 128 * 768 * 4


def test_partial_sums_leave_a_small_l2_unless_ctas_hold_them() -> None:
    schedule = read_schedule("m | n l k", G4)
    tiling = Tiling({"m": 128, "n": 128, "k": 64, "l": 96}, {})
    residency, tiny = kept(G4, schedule), Machine(2**10)
    found = movement(G4, schedule, tiling, residency, tiny).bytes["hbm"]["E"]
    assert found == (24 + 23) * 128 * 768 * 4
    held = Residency({**residency.hold, "E": schedule.position("n")})
    check_residency(G4, schedule, held)
    assert movement(G4, schedule, tiling, held, tiny).bytes["hbm"]["E"] == 128 * 768 * 2


def test_levels_of_a_run_are_in_order() -> None:
    """What comes from HBM crosses L2, and what crosses L2 arrives in at least one CTA."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        case = random_case(rng)
        machine = Machine(int(rng.choice([10, 100, 10**6])))
        found = movement(case.chain, case.schedule, case.tiling, case.residency, machine).bytes
        further = {name for each in case.chain.products for name in each.further}
        for tensor in case.chain.tensors:
            if tensor.role == "input":
                name = tensor.name
                if name not in further:
                    assert found["l2"][name] <= found["shared"][name] <= found["registers"][name]
                assert found["hbm"][name] <= found["l2"][name]
                assert found["hbm"][name] >= case.chain.elements(name) * tensor.item


def test_clusters_that_share_a_sum_of_the_intermediate_add_it_in_l2() -> None:
    schedule = read_schedule("m k | n l", G4)
    tiling = Tiling({"m": 128, "n": 128, "k": 64, "l": 96}, {})
    found = movement(G4, schedule, tiling, kept(G4, schedule), H100)
    assert found.bytes["l2"]["C"] == 12 * 128 * 3072 * 4 + 128 * 3072 * 2
    whole = Tiling({**tiling.block, "k": 768}, {})
    assert movement(G4, schedule, whole, kept(G4, schedule), H100).bytes["l2"]["C"] == 0


def test_gate_and_up_on_two_ctas() -> None:
    """They share A and exchange halves of their tiles; each weight goes to one of them."""
    chain = matrix_chain(128, [64, 256, 64], gated=True)
    schedule = read_schedule("m n l | k", chain)
    block = {"m": 128, "n": 64, "k": 64, "l": 16}
    tiling = Tiling(block, {"n": 4, "l": 4, "terms": 2})
    check_tiling(chain, tiling)
    residency = kept(chain, schedule)
    found = movement(chain, schedule, tiling, residency, H100).bytes
    apart = movement(chain, schedule, Tiling(block, {"n": 4, "l": 4}), residency, H100).bytes
    assert found["shared"]["A"] == 2 * 4 * 128 * 64 * 2 == 2 * apart["shared"]["A"]
    assert found["shared"]["B_up"] == 256 * 64 * 2 == apart["shared"]["B_up"]
    # All-exchange: float32 products to the peer by halves, results back. Then shuffle 2, reduce 2.
    assert found["dsm"]["C"] == 128 * 256 * (4 + 2) + 2 * 128 * 256 * 2
    assert found["dsm"]["E"] == 128 * 64 * 4
    assert apart["dsm"] == {"C": 3 * 128 * 256 * 2, "E": 0}
    assert found["registers"]["A"] == apart["registers"]["A"]
    # Each of them sums over all of k.
    assert grains(chain, schedule, tiling)["cta"][0]["k"].lanes == 1
    made = nests(chain, schedule, tiling, residency)["cta"]
    assert accumulators(chain, tiling.cluster, made, 0, 0) == 128 * 64 * 4
    assert accumulators(chain, {}, made, 0, 0) == 2 * 128 * 64 * 4


def footprints(chain: Chain, made: tuple[Nest, ...], residency: Residency) -> dict[str, Count]:
    """Bytes that a unit has of each tensor; of an intermediate its own part."""
    found: dict[str, Count] = {}
    for nest, product in zip(made, chain.products, strict=True):
        for name in (product.left, *product.rights, product.output):
            tensor = chain.tensor(name)
            hold = residency.position(tensor, nest.schedule)
            if name not in found:
                found[name] = region_elements(nest, tensor.dims, hold) * tensor.item
    return found


def test_footprints_of_a_cta() -> None:
    schedule = read_schedule("m | l n k", G4)
    residency = kept(G4, schedule)
    made = nests(G4, schedule, TILES, residency)["cta"]
    # Of 3072 columns in steps of 8 * 128, this CTA makes 3 * 128 and gathers those of its group.
    assert footprints(G4, made, residency) == {
        "A": 128 * 64 * 2,
        "B": 128 * 64 * 2,
        "C": 128 * 384 * 2,
        "D": 96 * 1024 * 2,
        "E": 128 * 96 * 2,
    }
    assert gathered(G4, made, 1, residency.hold["C"]) == 128 * 3072 * 2
    assert accumulators(G4, {}, made, 0, schedule.position("k")) == 128 * 128 * 4
    assert accumulators(G4, {}, made, 1, schedule.position("n")) == 128 * 96 * 4


@pytest.mark.parametrize(
    ("residency", "text"),
    [
        (Residency({"X": 0}), "hold of X: found 0; limit: 0 to 2, for one of A, B, C, D, E"),
        (Residency({"A": 3}), "hold of A: found 3; limit: 0 to 2"),
        (
            Residency({"C": 2}),
            "hold of C: found 2; limit: 1, outside the loop over 'k', before which no tile is made",
        ),
        (Residency({"C": 1}, frozenset("A")), "grid_wide: found A; limit: intermediates: C"),
    ],
)
def test_residencies_that_cannot_be_are_refused(residency: Residency, text: str) -> None:
    with pytest.raises(PlanRefused) as caught:
        check_residency(G4, read_schedule("m n | l k", G4), residency)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"m": 1, "n": 1, "k": 1}, "block l: found none; limit: a positive integer for each of m"),
        ({"m": 0, "n": 1, "k": 1, "l": 1}, "block m: found 0"),
        ({"m": 1, "n": 1, "k": 1, "l": 1, "x": 4}, "block x: found 4"),
    ],
)
def test_tiles_that_cannot_be_are_refused(block: dict[str, int], text: str) -> None:
    with pytest.raises(PlanRefused) as caught:
        check_tiling(G4, Tiling(block, {}))
    assert text in str(caught.value)
