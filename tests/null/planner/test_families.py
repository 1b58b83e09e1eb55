"""Families say of themselves what plans, candidates, placements and benchmarks ask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import pytest

from crossfuse.bench.job import OWN, VARIANTS
from crossfuse.compiler.options import PLACEMENTS
from crossfuse.errors import PlanRefused
from crossfuse.meta_schedule import candidate
from crossfuse.planner import plan as planning
from crossfuse.planner.cascade import plan as cascades
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.explain import explanation
from crossfuse.planner.families import registry
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.families.registry import CASCADE_FAMILIES, FAMILIES
from crossfuse.planner.families.stream import Stream
from crossfuse.planner.families.tiled import STAGED, StagedKernel


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda each: each.name)
def test_every_family_of_chains_is_known_everywhere(family: ChainFamily) -> None:
    assert FAMILIES[family.name] is family
    assert set(family.placements) <= set(PLACEMENTS)
    for place, text in family.placements.items():
        assert (OWN[f"ours-{place}"], VARIANTS[f"ours-{place}"]) == (place, text)
    assert candidate.FAMILIES[family.name] == family.summary


def test_a_placement_is_of_one_family_for_chains_of_a_length() -> None:
    names = [(each.products, name) for each in FAMILIES.values() for name in each.placements]
    assert len(set(names)) == len(names)
    assert {*PLACEMENTS} == {"auto", *(name for _, name in names)}


def test_names_of_chains_and_cascades_differ() -> None:
    assert not FAMILIES.keys() & CASCADE_FAMILIES.keys()
    assert all(
        candidate.FAMILIES[name] == each.summary() for name, each in CASCADE_FAMILIES.items()
    )


@dataclass(frozen=True)
class LateKernel(StagedKernel):
    """Kernels of a family that came after trees were learned."""

    family: ClassVar[str] = "late"


def test_a_new_family_is_planned_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    late = replace(STAGED, kernel=LateKernel, placements={})
    known = MappingProxyType({**FAMILIES, late.name: late})
    for module in (registry, planning):
        monkeypatch.setattr(module, "FAMILIES", known)
    found = planning.plan("G4", only=("late",))
    assert (found.family, found.tiles.keys()) == ("late", {"first", "second"})
    told = explanation.explain(found)
    assert "late: rows=" in told.text()
    assert list(told.pruned) == ["registers", "dsm", "l2", "global", "late"]


class LateStream(Stream):
    """Streams of a family that came after the others."""

    name: ClassVar[str] = "late"

    @classmethod
    def matches(cls, shape: CascadeShape) -> bool:
        """Whether rows are short."""
        return super().matches(shape) and cls(shape).work.length <= 4096


def test_a_new_family_of_cascades_is_planned_by_what_it_matches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = MappingProxyType({**CASCADE_FAMILIES, LateStream.name: LateStream})
    for module in (registry, cascades):
        monkeypatch.setattr(module, "CASCADE_FAMILIES", known)
    found = cascades.plan_cascade("softmax:rows=64,cols=1024", only=("late",))
    assert found.family == "late"
    with pytest.raises(PlanRefused, match=r"found a cascade whose family is .stream.;"):
        cascades.plan_cascade("softmax:rows=64,cols=8192", only=("late",))
