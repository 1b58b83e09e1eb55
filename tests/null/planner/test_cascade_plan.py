"""Plans of cascades: values that travel, say why, and add up."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from crossfuse.cascade.rewrite.tiles import CascadeTiles, StreamTiles
from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.planner.cascade.plan import (
    CascadePlan,
    eager_estimate,
    placed_cascade,
    plan_cascade,
    ranked_cascade,
)
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.registry import CASCADE_FAMILIES, cascade_families, read_tiles
from crossfuse.planner.families.stream import stream_estimate
from crossfuse.planner.plan import Plan
from crossfuse.planner.tune.kernel_space import cascade_space_of
from crossfuse.planner.tune.strategy import STRATEGIES, make_strategy
from null.cascade.test_stream_tiles import MEASURED, WORKS, tiles_of
from null.planner.cascades import DECODE, SOFTMAX
from null.planner.tune.planted import drive

H100 = device("nvidia-h100")
RATES = rates_of(H100)


@pytest.mark.parametrize("shape", [SOFTMAX, DECODE], ids=["stream", "tiles"])
def test_a_plan_survives_json(shape: CascadeShape) -> None:
    found = plan_cascade(shape)
    assert CascadePlan.from_json(found.to_json()) == found
    assert sum(found.terms.values()) == pytest.approx(found.microseconds)
    assert found.family == cascade_families(shape)[-1].name


def test_json_of_something_else_is_refused() -> None:
    text = plan_cascade(SOFTMAX).to_json().replace('"cascade"', '"chain"', 1)
    with pytest.raises(PlanRefused, match="found a plan of something else"):
        CascadePlan.from_json(text)
    old = plan_cascade(SOFTMAX).to_json().replace('"version": 2', '"version": 1', 1)
    with pytest.raises(PlanRefused, match="found version 1; limit: version 2, in a plan of vers"):
        CascadePlan.from_json(old)
    with pytest.raises(PlanRefused, match="plan-json"):
        Plan.from_json(plan_cascade(SOFTMAX).to_json())


def test_runners_are_other_places_and_not_fusing() -> None:
    found = plan_cascade(SOFTMAX)
    assert found.place == "states in DSM, elements in registers"
    assert {each.family for each in found.runners} >= {
        "stream: states in registers, elements in shared memory",
        EAGER,
    }
    times = [each.microseconds for each in found.runners]
    assert times == sorted(times) and times[0] > found.microseconds
    clustered = plan_cascade(DECODE)
    assert clustered.place == "states in DSM"
    # Not fusing is counted without the scores' way through memory, and is told too well here.
    assert {each.family for each in clustered.runners} == {
        EAGER,
        "tiles: states in global memory",
        "tiles: states in registers",
    }


def test_a_second_kernel_loses_by_its_launch() -> None:
    found = plan_cascade(DECODE)
    (stored,) = (each for each in found.runners if each.family.endswith("global memory"))
    assert stored.microseconds > found.microseconds
    assert next(iter(stored.loses)) == "relaunch"
    assert all(each.place != "states in global memory" for each in ranked_cascade(DECODE))


@pytest.mark.parametrize(
    ("place", "words"),
    [("registers", "registers"), ("dsm", "DSM"), ("global", "global memory")],
)
def test_states_are_where_they_are_asked_for(place: str, words: str) -> None:
    found = placed_cascade(DECODE, place)
    assert {each.place for each in found} == {f"states in {words}"}
    times = [each.microseconds for each in found]
    assert min(times) >= times[0] / 1.02
    parts, taken = int(found[0].tiles["cluster"]), found[0].taken
    assert taken is not None and (parts > 1) == (place != "registers")
    assert taken.cluster == (parts if place == "dsm" else 1)
    assert CascadePlan.from_json(found[0].to_json()) == found[0]


def test_streams_of_threads_merge_in_no_second_kernel() -> None:
    assert placed_cascade(SOFTMAX, "registers")[0].place.startswith("states in registers")
    for place in ("global", "l2"):
        with pytest.raises(PlanRefused) as caught:
            placed_cascade(SOFTMAX, place)
        assert f"found placement {place!r}, and no kernel that keeps states there" in str(
            caught.value
        )


def test_separate_kernels_are_counted_pass_by_pass() -> None:
    (found,) = ranked_cascade(SOFTMAX, only=(EAGER,))
    assert found.bytes["hbm"] == 1024 * 2**20 + 2 * 16384
    assert found.taken is None and found.tiles == {}
    assert found.terms["kernels"] == pytest.approx(3 * RATES.fitted.eager_kernel)
    reasons = found.explain()
    assert [each.name for each, _ in reasons.passes] == ["m", "s", "y"]
    assert "do not fuse: separate kernels" in reasons.text()


#: torch.compile, which makes a kernel of each pass (benchmarks/results/cascades-h100.json).
@pytest.mark.parametrize(("name", "measured"), [("cross entropy", 684.2), ("inertia", 681.8)])
def test_two_passes_take_what_two_kernels_took(name: str, measured: float) -> None:
    from crossfuse.cascade.rewrite.work import Pass

    work = WORKS[name]
    each = Pass("a pass", work.rows * work.length * work.read, 0)
    found = eager_estimate((each, each), H100, RATES)
    assert found.microseconds == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("shape", [SOFTMAX, DECODE], ids=["stream", "tiles"])
def test_an_explanation_says_everything(shape: CascadeShape) -> None:
    plans = ranked_cascade(shape, keep=3)
    reasons = plans[0].explain()
    text = reasons.text()
    for words in (
        "us estimated on nvidia-h100, bound by hbm",
        "levels",
        "terms of the estimate",
        "what the kernel takes",
        "not fused: one kernel after another",
        "the best of every other place",
        "tiles that rules leave",
    ):
        assert words in text
    document = json.loads(json.dumps(reasons.to_json()))
    assert CascadePlan.from_json(json.dumps(document["plan"])) == plans[0]
    assert document["pruned"][plans[0].family][0]["name"] == "all"
    amounts = {each["name"]: each["amount"] for each in document["levels"]}
    assert amounts["hbm"] == plans[0].bytes["hbm"]
    picture = ElementTree.fromstring(reasons.svg())
    kinds = [each.get("class") for each in picture.iter() if each.get("class")]
    assert kinds.count("level") >= 3 and kinds.count("term") == len(plans[0].terms)


def test_rules_count_what_they_leave() -> None:
    steps = plan_cascade(DECODE).explain().pruned["tiles"]
    left = [each.candidates for each in steps]
    assert left == sorted(left, reverse=True)
    assert left[-1] == len(ranked_cascade(DECODE, only=("tiles",)))


def test_families_of_chains_are_refused() -> None:
    with pytest.raises(PlanRefused) as caught:
        plan_cascade(SOFTMAX, only=("l2",))
    assert str(caught.value) == (
        "plan: only: found 'l2'; limit: stream, tiles, warps, rows, rows_chain, attention_out, "
        "row_sums, eager of a cascade. "
        "Instead: name some of these families."
    )
    with pytest.raises(PlanRefused) as caught:
        plan_cascade(SOFTMAX, only=("tiles",))
    assert "found a cascade whose family is 'stream'" in str(caught.value)


def test_unknown_tiles_are_refused() -> None:
    assert read_tiles("stream", {"threads": 64}) == StreamTiles(threads=64)
    assert read_tiles(
        "tiles", CASCADE_FAMILIES["tiles"].fields(CascadeTiles(rows=64))
    ) == CascadeTiles(rows=64)
    with pytest.raises(PlanRefused) as caught:
        read_tiles("tiles", {"threads": 64})
    assert str(caught.value) == (
        "tiles: family 'tiles': found threads: unknown; limit: at most rows, elements, columns, "
        "depth, stages, warpgroups, cluster, share, merge. Instead: name tile extents like these."
    )


@pytest.mark.parametrize("name", [name for name, table in MEASURED.items() if len(table) > 2])
def test_tables_of_streams_are_ranked(name: str) -> None:
    from scipy.stats import spearmanr

    table = MEASURED[name]
    times = [
        float(stream_estimate(WORKS[name], tiles_of(each), H100, RATES).microseconds)
        for each in table
    ]
    assert spearmanr(times, list(table.values())).statistic >= 0.8
    first = list(table.values())[times.index(min(times))]
    assert first <= 1.05 * min(table.values())


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_search_finds_planted_tiles(name: str) -> None:
    """Times are the estimate's, but for one kind of tiles that is twice as fast."""
    space = cascade_space_of(SOFTMAX, H100, RATES)

    def time(point: int) -> float:
        _, tiles = space.tiles(point)
        return float(space.prior[point]) * (0.5 if tiles["threads"] == 512 else 1.0)

    search = make_strategy(name, space, None, 0)
    best = drive(search, lambda points: [time(each) for each in points], len(space))
    assert best is not None and space.tiles(best)[1]["threads"] == 512
    assert len(search.measured) == len(space)


def test_points_are_tiles() -> None:
    space = cascade_space_of(DECODE, H100, RATES)
    for point in range(len(space)):
        assert space.find(*space.tiles(point)) == point
        for to in space.moves(point).values():
            assert 0 <= to < len(space)
    assert space.find("stream", {"threads": 64}) is None
    assert space.find("tiles", {"rows": 63}) is None
    assert space.tiles(space.order[0])[1] == dict(plan_cascade(DECODE).tiles)


@pytest.mark.parametrize("kind", ["softmax", "layernorm", "log_softmax", "rmsnorm", "variance"])
def test_rows_of_any_length_have_a_kernel(kind: str) -> None:
    """Short, odd and wide ones: no rule of thumb leaves none."""
    for dtype in ("float32", "bfloat16"):
        for rows, length in ((1, 1), (3, 131), (1000, 7), (16, 50257), (3, 300001)):
            found = plan_cascade(f"{kind}:rows={rows},cols={length},dtype={dtype}")
            assert found.family == "stream"
