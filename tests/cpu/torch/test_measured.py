"""The backend with a timer: which groups become kernels, and what the report says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse.measure.job import GRAPH, LIBRARY, Way  # noqa: E402
from crossfuse.torch import Backend, Report, reports  # noqa: E402
from null.measure.timers import FakeTimer  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_dynamo")]

D, H = 64, 128


class Layers(nn.Module):
    """Two equal layers, with rows between that belong to no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.ModuleList([nn.Linear(D, H), nn.Linear(H, D)]) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expand, contract in (self.first, self.second):
            x = contract(F.gelu(expand(torch.softmax(x, -1))))
        return x


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entrants are not built: who times them here does not run them."""

    def built(functions: Mapping[int, Any], target: Any, folder: Path) -> dict[int, Path]:
        return {place: folder / str(place) for place in functions}

    monkeypatch.setattr("crossfuse.relax.choice._built", built)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def report_of(
    answer: Callable[[Way], float | str],
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> tuple[Report, FakeTimer]:
    timer = FakeTimer(answer)
    monkeypatch.setattr("crossfuse.measure.timer.find_timer", lambda index: timer)
    options = {"measure": True, "rest": "eager", "cpu": "build", **options}
    backend = Backend(target="nvidia-h100", **options)
    fn = torch.compile(Layers().bfloat16().eval(), backend=backend)
    with torch.no_grad():
        try:
            fn(torch.randn(16, D).bfloat16())
        except Exception:  # kernels of a GPU do not run here
            assert reports()[-1].fused
    return reports()[-1], timer


@pytest.mark.slow
def test_separate_kernels_stay_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(way: Way) -> float:
        if way.kind == LIBRARY:
            return 10.0
        # What it is held against are the nodes that it would replace.
        run = torch.load(way.source, weights_only=False)
        given = [torch.randn(each.shape).to(getattr(torch, each.dtype)) for each in way.given]
        shape = tuple(run(*given).shape)
        assert shape == (16, D)
        return 9.0

    found, timer = report_of(answer, monkeypatch, always=False, products=False)
    assert not found.fused
    assert [each.kind for each in timer.asked].count(
        GRAPH
    ) == 2  # equal layers once, alone and with a softmax
    planned = [each.family for each in found.outcomes if each.family]
    assert planned == ["eager"] * len(planned) and len(planned) >= 3
    text = " ".join(found.text().split())
    assert "no kernel was measured to be faster than not to fuse" in text
    assert "measured on NVIDIA H100 80GB HBM3: " in text
    assert "separate kernels won" in text


@pytest.mark.slow
def test_the_fastest_kernel_takes_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(way: Way) -> float:
        return {"0": 9.0, "1": 5.0}.get(Path(way.source).name, 8.0)

    found, timer = report_of(answer, monkeypatch)
    assert len(found.fused) == 2
    taken = [each for each in found.outcomes if each.name]
    assert [(each.microseconds, each.eager_microseconds) for each in taken] == [(5.0, 8.0)] * 2
    assert "5.0 of 8.0 us measured" in found.text()
    assert timer.closed == 1


@pytest.mark.slow
def test_kernels_that_do_not_run_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(way: Way) -> float | str:
        return "timeout: no answer in 60 s" if way.kind == LIBRARY else 8.0

    found, _ = report_of(answer, monkeypatch, always=True)
    assert not found.fused
    assert "none of its kernels ran" in found.text()


@pytest.mark.slow
def test_each_bin_of_symbolic_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: dict[int, float] = {}

    def answer(way: Way) -> float:
        count = way.given[0].shape[0]
        rows.setdefault(count, 0.0)
        return 10.0 if way.kind == LIBRARY else 5.0

    module = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))
    timer = FakeTimer(answer)
    monkeypatch.setattr("crossfuse.measure.timer.find_timer", lambda index: timer)
    backend = Backend(target="nvidia-h100", measure=True, rest="eager", cpu="build", bins=(16, 128))
    x = torch.randn(48, D).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        torch.compile(module.bfloat16().eval(), backend=backend)(x)
    assert sorted(rows) == [16, 128]
    assert not reports()[-1].fused


def test_without_a_gpu_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossfuse.measure.timer.find_gpus", tuple)
    backend = Backend(measure=True, rest="eager", cpu="llvm", always=True)
    with torch.no_grad():
        torch.compile(Layers().bfloat16().eval(), backend=backend)(torch.randn(16, D).bfloat16())
    assert reports()[-1].text().endswith("not measured: functions on the CPU are no kernels")
    backend = Backend(measure=True, rest="eager", cpu="build", bins=(16,), target="nvidia-h100")
    with torch.no_grad():
        fn = torch.compile(nn.Linear(D, H).eval(), backend=backend)
        fn(torch.randn(16, D))
    assert reports()[-1].text().endswith("not measured: no CUDA device; estimates chose")


def test_modes_that_measure() -> None:
    modes = {each: Backend(mode=each).measures for each in ("", "default", "reduce-overhead")}
    assert not any(modes.values())
    assert Backend(mode="max-autotune").measures
    assert Backend(mode="max-autotune-no-cudagraphs").measures
    assert Backend().choices != Backend(measure=True).choices
