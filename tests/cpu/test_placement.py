"""What `placement="auto"` tries, and in which order: what the planner finds the fastest."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import crossfuse
import crossfuse.compiler.options
from crossfuse.compiler.options import Option, placed_options, tensor_options
from crossfuse.compiler.source import read_source
from crossfuse.errors import ScheduleRefused
from crossfuse.hardware import device
from crossfuse.planner.chain.build import chain_of
from crossfuse.planner.families.registry import FAMILIES, families, family_times
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.planner.plan import plan
from crossfuse.workload import prim_func, resolve

H100 = device("nvidia-h100")
SMALL = "gated_ffn:M=16,K=64,N=256,L=64,dtype=bfloat16"


def rules(options: list[Option]) -> list[str]:
    """Names of the families whose rules options call."""
    found = []
    for each in options:
        assert isinstance(each.make, partial)
        found.append(each.make.func.__self__.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["G1", "G4", "G7", "S3", "S8:M=16"])
def test_the_first_is_the_plan(name: str) -> None:
    first, *others = tensor_options(read_source(name), "auto", H100)
    best = plan(name)
    assert first.plan == best
    assert first.why["plan"] == {
        "family": best.family,
        "tiles": best.tiles,
        "microseconds": best.microseconds,
        "eager_microseconds": plan(name, only=("eager",)).microseconds,
        "eager_is_faster": False,
    }
    assert others
    assert all(each.plan is not None and each.plan.family != "eager" for each in others)


@pytest.mark.slow
def test_where_not_to_fuse_is_faster_the_best_kernel_is_compiled_all_the_same() -> None:
    text = "gemm_chain:M=512,K=4096,N=256,L=4096,dtype=bfloat16"
    best = plan(text)
    assert best.family == "eager"
    first, *_ = tensor_options(read_source(text), "auto", H100)
    assert first.plan is not None
    assert first.plan.family == best.runners[0].family
    assert ("eager", best.microseconds) in [(e.family, e.microseconds) for e in first.plan.runners]
    assert first.why["plan"]["eager_is_faster"]
    assert first.why["plan"]["eager_microseconds"] == best.microseconds


def test_what_was_planned_is_in_the_manifest(tmp_path: Any) -> None:
    compiled = crossfuse.compile(SMALL, directory=tmp_path)
    best = plan(SMALL)
    assert compiled.plan == best
    metadata = compiled.artefact.manifest.metadata
    assert metadata["plan"]["family"] == best.family
    assert metadata["plan"]["tiles"] == best.tiles
    assert metadata["plan"]["eager_is_faster"] is False
    assert "not_planned" not in metadata


@pytest.mark.parametrize(
    ("name", "cluster", "reason"),
    [
        ("G1", 4, "clusters of 4 CTAs were asked for"),
        ("gemm:M=64,K=256,N=512", 2, "clusters of 2 CTAs were asked for"),
    ],
)
def test_what_the_planner_has_no_kernels_of_has_the_tiles_of_the_rules(
    name: str, cluster: int, reason: str
) -> None:
    spec = resolve(name)
    for source in (spec, prim_func(spec)):
        options = tensor_options(read_source(source), "auto", H100, cluster=cluster)
        assert [(each.plan, each.why) for each in options] == [
            (None, {"not_planned": reason})
        ] * len(options)
        assert len(options) == (4 if spec.L else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["C3", "C5"])
def test_convolutions_are_planned_as_products_of_their_windows(name: str) -> None:
    spec = resolve(name)
    of_spec = tensor_options(read_source(spec), "auto", H100)[0].plan
    of_function = tensor_options(read_source(prim_func(spec)), "auto", H100)[0].plan
    assert of_spec is not None and of_function is not None
    best = plan(name, only=tuple(FAMILIES))
    for found in (of_spec, of_function):
        assert (found.family, found.tiles) == (best.family, best.tiles)
        # Pixels are counted once, however many windows have them.
        assert found.bytes == best.bytes


def test_a_chain_that_cannot_be_planned_is_left_to_the_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from crossfuse.errors import PlanRefused, refuse

    def refuses(*_: Any, **__: Any) -> None:
        found = "found nothing"
        raise refuse(PlanRefused, "plan", "chain", found=found, limit="one", instead="wait")

    monkeypatch.setattr(crossfuse.compiler.options, "planned_options", refuses)
    options = tensor_options(read_source("G1"), "auto", H100)
    assert len(options) == 4
    assert "found nothing" in options[0].why["not_planned"]


@pytest.mark.parametrize("name", ["C4", "G4"])
def test_places_are_in_the_order_of_their_times(name: str) -> None:
    spec = resolve(name)
    shape = shape_of(chain_of(spec), k_major=True)
    times = family_times(shape, H100, families(shape))
    assert [time for _, time in times] == sorted(time for _, time in times)
    options = tensor_options(read_source(name), "auto", H100, cluster=4)
    places = tuple(place for place, _ in times)
    assert rules(options) == rules(placed_options(prim_func(spec), places, H100, cluster=4))


def test_a_place_that_was_named_is_the_only_one() -> None:
    (option,) = tensor_options(read_source("G1"), "dsm", H100)
    assert (option.plan, option.why) == (None, {})
    assert rules([option]) == ["dsm"]


def test_planned_is_no_place() -> None:
    with pytest.raises(ScheduleRefused, match="compile: placement: found 'planned'; limit: 'auto'"):
        crossfuse.compile("G1", placement="planned")


@pytest.mark.parametrize("place", ["dsm", "registers"])
def test_eight_bits_stay_in_no_cluster_and_no_registers(place: str) -> None:
    text = "gated_ffn:M=64,K=256,N=512,L=256,dtype=float8_e4m3fn,out=bfloat16,weights=nk"
    for source in (text, prim_func(resolve(text))):
        options = tensor_options(read_source(source), "auto", H100)
        families = [each.plan.family for each in options if each.plan is not None]
        assert set(families) == {"l2", "global"}
        (named,) = tensor_options(read_source(source), place, H100)
        with pytest.raises(ScheduleRefused, match=r"with elements of 8 bits; limit: .* of 16 bits"):
            named.make()
