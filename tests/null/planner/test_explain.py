"""Explanations: they add up, say the same as the plan, and can be read by people and scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from xml.etree import ElementTree

import pytest

from crossfuse.errors import RefusedError
from crossfuse.hardware import device
from crossfuse.planner.cost.terms import TERMS
from crossfuse.planner.explain.explanation import Explanation, explain, explain_best
from crossfuse.planner.explain.levels import LEVELS, Share
from crossfuse.planner.families.registry import FAMILIES
from crossfuse.planner.kernels.shape import count as kernels_of
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.planner.plan import Plan, plan, ranked

H100 = device("nvidia-h100")
#: One for each family, and what else kernels differ in.
CASES = (
    ("G1", "registers"),
    ("S8:M=16", "registers"),
    ("G4", "dsm"),
    ("G10:M=512", "dsm"),
    ("S3", "l2"),
    ("G4:M=512,weights=nk", "global"),
    ("gemm:M=512,K=768,N=3072", "gemm"),
    ("gemm:M=16,K=4096,N=1024", "gemm"),
    ("G4", "eager"),
)
FUSED = CASES[:-1]


@cache
def explained(text: str, family: str) -> Explanation:
    return plan(text, only=(family,)).explain()


@pytest.mark.parametrize(("text", "family"), CASES)
def test_levels_are_those_of_the_plan(text: str, family: str) -> None:
    found = explained(text, family)
    levels = {each.name: each for each in found.levels}
    assert [each for each in LEVELS if each in levels] == list(levels)
    assert levels["tensor"].amount == found.plan.chain.flops
    for name, size in found.plan.bytes.items():
        assert levels[name].amount == size
    times = [each.microseconds for each in found.levels if each.microseconds is not None]
    assert all(each >= 0 for each in times)
    assert set(found.plan.terms) <= set(TERMS)


@pytest.mark.parametrize(("text", "family"), FUSED)
def test_levels_narrow_towards_memory(text: str, family: str) -> None:
    levels = {each.name: each.amount for each in explained(text, family).levels}
    # A tile that arrives is multiplied once at least; what several share leaves L2 once.
    assert levels["registers"] > 0
    outputs = levels["l2"] - levels["hbm"]
    assert outputs >= 0
    assert levels["shared"] >= levels["dsm"]


@pytest.mark.parametrize(("text", "family"), FUSED)
def test_shared_memory_adds_up(text: str, family: str) -> None:
    found = explained(text, family)
    assert len(found.usage) == len(found.plan.kernels)
    for usage, kernel in zip(found.usage, found.plan.kernels, strict=True):
        assert sum(usage.shared.values()) == kernel.shared_bytes
        assert all(each > 0 for each in usage.shared.values())
        # Barriers, and what tiles are aligned to.
        assert usage.shared["barriers and padding"] < 2048
        assert usage.clusters * kernel.cluster == kernel.ctas
        assert usage.idle_sms == H100.sms - kernel.busy
        assert all(each >= 1 for each in usage.waves)


@pytest.mark.parametrize(("text", "family"), CASES)
def test_every_tensor_has_a_place(text: str, family: str) -> None:
    found = explained(text, family)
    chain = found.plan.chain
    whole = [each.tensor for each in found.places if each.role != "sums"]
    assert sorted(whole) == sorted(each.name for each in chain.tensors)
    for each in found.places:
        if each.role != "sums":
            assert each.role == chain.tensor(each.tensor).role
    between = {each.level for each in found.places if each.role == "intermediate"}
    where = {"registers": "registers", "dsm": "dsm", "l2": "l2", "global": "l2", "eager": "l2"}
    assert between <= {where.get(family)}


def extent(share: tuple[int, int]) -> int:
    return share[1] - share[0]


def volume(shares: Sequence[Share]) -> int:
    return sum(extent(each.rows) * extent(each.columns) * extent(each.reduction) for each in shares)


def overlaps(a: Share, b: Share) -> bool:
    pairs = ((a.rows, b.rows), (a.columns, b.columns), (a.reduction, b.reduction))
    return all(max(one[0], other[0]) < min(one[1], other[1]) for one, other in pairs)


@pytest.mark.parametrize(("text", "family"), FUSED)
def test_ctas_of_a_cluster_share_the_work_without_overlap(text: str, family: str) -> None:
    found = explained(text, family)
    size = found.plan.kernels[0].cluster
    for phase in range(len(found.plan.chain.products)):
        shares = [each for each in found.layout if each.phase == phase]
        assert [each.cta for each in shares] == list(range(size))
        assert volume(shares) > 0
        for number, one in enumerate(shares):
            assert not any(overlaps(one, other) for other in shares[number + 1 :])


def test_a_cluster_multiplies_what_it_made() -> None:
    kept = explained("G1", "registers").layout
    for made, summed in zip(kept[: len(kept) // 2], kept[len(kept) // 2 :], strict=True):
        assert made.columns == summed.reduction
    gathered = explained("G4", "dsm").layout
    made = [each.columns for each in gathered if each.phase == 0]
    for each in gathered:
        if each.phase == 1:
            assert each.reduction == (made[0][0], made[-1][1])


@pytest.mark.parametrize(("text", "family"), FUSED)
def test_rules_leave_what_is_ranked(text: str, family: str) -> None:
    found = explained(text, family)
    shape = shape_of(found.plan.chain, k_major=found.plan.k_major)
    for name, steps in found.pruned.items():
        left = [each.candidates for each in steps]
        assert left == sorted(left, reverse=True)
        assert left[-1] == kernels_of(FAMILIES[name].every(shape, H100))
        assert len({each.name for each in steps}) == len(steps)


def test_further_plans_are_compared_with_the_first() -> None:
    found = explain_best("G4", top=4)
    plans = ranked("G4", keep=4)
    assert found.plan == plans[0]
    assert [each.tiles for each in found.best] == [each.tiles for each in plans[1:4]]
    for each, other in zip(found.best, plans[1:4], strict=True):
        more = sum(each.loses.values())
        assert more >= other.microseconds - found.plan.microseconds - 0.01


@pytest.mark.parametrize(("text", "family"), CASES)
def test_json_gives_the_plan_back(text: str, family: str) -> None:
    found = explained(text, family)
    document = json.loads(json.dumps(found.to_json()))
    assert Plan.from_json(json.dumps(document["plan"])) == found.plan
    assert set(document) == {
        "version",
        "plan",
        "levels",
        "places",
        "usage",
        "layout",
        "best",
        "pruned",
        "provisional",
    }
    assert set(document["levels"][0]) == {"name", "amount", "microseconds"}


@pytest.mark.parametrize(("text", "family"), CASES)
def test_the_picture_has_a_bar_for_each_level_term_and_cta(text: str, family: str) -> None:
    found = explained(text, family)
    root = ElementTree.fromstring(found.svg())
    space = "{http://www.w3.org/2000/svg}"
    boxes: dict[str, list[ElementTree.Element]] = {}
    for each in root.iter(f"{space}rect"):
        boxes.setdefault(each.attrib["class"], []).append(each)
    timed = [each for each in found.levels if each.microseconds is not None]
    assert len(boxes["level"]) == len(timed)
    assert len(boxes["term"]) == len(found.plan.terms)
    assert len(boxes.get("tile", [])) == len(found.layout)
    width = float(root.attrib["width"])
    height = float(root.attrib["height"])
    for each in root.iter(f"{space}rect"):
        place = each.attrib
        assert float(place["x"]) + float(place["width"]) <= width
        assert float(place["y"]) + float(place["height"]) <= height
    lengths = [float(each.attrib["width"]) for each in boxes["level"]]
    slowest = max(range(len(timed)), key=lambda index: timed[index].microseconds or 0.0)
    assert lengths[slowest] == max(lengths)


@pytest.mark.parametrize("width", [80, 140])
def test_text_stays_within_its_width(width: int) -> None:
    found = explain_best("S3", top=3)
    lines = found.text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line != line.rstrip() for line in lines)


def test_text_is_text_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = explained("G4", "dsm")
    expected = reasons.text()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert reasons.text() == expected


def test_text_says_what_was_chosen_and_who_lost_on_what() -> None:
    found = explain_best("G1", top=2)
    text = found.text(200)
    assert f"{found.plan.microseconds:.2f} us estimated, bound by {found.plan.bound}" in text
    for each in found.plan.runners:
        name, more = next(iter(each.loses.items()))
        assert f"{name} +{more:.2f}" in text
    assert "do not fuse" in text
    assert "next best plans" in text


def test_a_plan_that_is_not_to_fuse_says_so() -> None:
    found = explained("G4", "eager")
    assert "do not fuse: a library's kernels" in found.text()
    assert found.usage == () and found.layout == ()


def test_a_plan_whose_tiles_are_not_of_its_family_is_refused() -> None:
    text = plan("G1").to_json().replace('"columns"', '"colums"')
    with pytest.raises(RefusedError, match="kernel-tiles: registers: found no columns"):
        explain(Plan.from_json(text))
