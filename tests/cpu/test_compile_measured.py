"""`compile` with a timer: the fastest of the first few kernels, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import crossfuse
from crossfuse.compiler import read_source
from crossfuse.compiler.compiled import Wanted, choose, options_of
from crossfuse.compiler.report import choice_text
from crossfuse.errors import EnvironmentRefused, LoweringRefused
from crossfuse.hardware import device
from crossfuse.measure.job import LIBRARY, PROGRAM, SPEC, Way
from null.measure.timers import FakeTimer

H100 = device("nvidia-h100")
CHAIN = "gemm_chain:M=16,K=64,N=128,L=64,act=relu"
ROWS = "softmax:rows=16,cols=2048"


@dataclass
class Library:
    shared_object: Path


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entrants are not built: who times them here does not run them."""
    built = crossfuse.runtime.build_library

    def build(image: Any, folder: Any, **options: Any) -> Any:
        if "crossfuse-measure-" in str(folder):
            return Library(Path(folder) / "main.so")
        return built(image, folder, **options)

    monkeypatch.setattr(crossfuse.runtime, "build_library", build)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def times(*ours: float | str, separate: float | str) -> FakeTimer:
    """A timer of kernels by their places in the plan; the last time is that of all others."""

    def answer(way: Way) -> float | str:
        if way.kind != LIBRARY:
            return separate
        return ours[min(int(Path(way.source).parent.name), len(ours) - 1)]

    return FakeTimer(answer)


@pytest.mark.slow
@pytest.mark.parametrize("text", [CHAIN, ROWS])
def test_the_fastest_kernel_is_compiled(text: str) -> None:
    source = read_source(text)
    options = options_of(source, H100)
    timer = times(10.0, 9.0, 8.0, 11.0, separate=20.0)
    chosen = choose(source, H100, timer=timer)
    assert chosen.option.plan == options[2].plan
    assert [each.kind for each in timer.asked] == [LIBRARY] * 4 + [SPEC]
    first = timer.asked[0].given
    assert [each.shape for each in first] == [tuple(map(int, b.shape)) for b in _inputs(chosen)]
    told = choice_text(chosen.why)
    assert "planned: " in told
    assert "measured on NVIDIA H100 80GB HBM3: " in told
    assert "8.00 us, " in told
    again = times(separate="asked again")
    assert choose(source, H100, timer=again).option.plan == options[2].plan
    assert not again.asked


def _inputs(chosen: Any) -> list[Any]:
    return [each for each in chosen.lowered.image.buffers if not each.output]


@pytest.mark.slow
def test_kernels_that_hang_lose_and_the_best_is_given_where_separate_ones_win() -> None:
    timer = times("timeout: no answer in 60 s", 9.0, separate=5.0)
    source = read_source(CHAIN)
    chosen = choose(source, H100, timer=timer)
    assert chosen.option.plan == options_of(source, H100)[1].plan
    assert choice_text(chosen.why).endswith("separate kernels 5.00 us; separate kernels won")


def test_none_runs() -> None:
    with pytest.raises(LoweringRefused, match=r"found .* none \(crashed: signal 11\)"):
        choose(read_source(CHAIN), H100, timer=times("crashed: signal 11", separate=5.0))


def test_what_torch_does_not_know_is_measured_alone() -> None:
    function = read_source(CHAIN).func
    timer = times(10.0, 8.0, separate=1.0)
    chosen = choose(read_source(function), H100, Wanted(rule="tensor"), timer=timer)
    assert {each.kind for each in timer.asked} == {LIBRARY}
    assert chosen.why["measured"]["baseline"] is None


@pytest.mark.slow
def test_a_module_is_measured_against_itself() -> None:
    torch = pytest.importorskip("torch")
    from crossfuse.workload import chain_module

    module, x = chain_module(64, 128), torch.randn(2, 8, 64).bfloat16()

    def answer(way: Way) -> float | str:
        if way.kind == LIBRARY:
            return 10.0
        program = torch.export.load(way.source).module()
        assert [each.shape for each in way.given] == [tuple(x.shape)]
        assert torch.equal(program(x), module(x))
        return 20.0

    timer = FakeTimer(answer)
    choose(read_source(module, (x,)), H100, timer=timer)
    assert timer.asked[-1].kind == PROGRAM


@pytest.mark.slow
def test_compile_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = times(10.0, 8.0, separate=9.5)
    monkeypatch.setattr("crossfuse.measure.timer.find_timer", lambda index: timer)
    kernel = crossfuse.compile(CHAIN, measure=True, target="nvidia-h100")
    found = kernel.measured
    assert found is not None and found.best is not None
    assert (found.best.place, found.fuse, found.times) == (1, True, (8.0, 9.5))
    assert timer.closed == 1
    with pytest.raises(EnvironmentRefused, match="measure: target nvidia-h200: found NVIDIA H100"):
        crossfuse.compile(CHAIN, measure=True, target="nvidia-h200")


def test_without_a_gpu_compile_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossfuse.measure.timer.find_gpus", tuple)
    with pytest.raises(EnvironmentRefused, match="leave measure out: the planner's estimates"):
        crossfuse.compile(CHAIN, measure=True)


@pytest.mark.slow
def test_the_command_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from crossfuse.cli import app

    words = ["compile", CHAIN, "--measure", "--target", "nvidia-h100", "-o", str(tmp_path)]
    monkeypatch.setattr("crossfuse.measure.timer.find_gpus", tuple)
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    timer = times(10.0, 8.0, separate=9.5)
    monkeypatch.setattr("crossfuse.measure.timer.find_timer", lambda index: timer)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert "measured on NVIDIA H100 80GB HBM3" in " ".join(done.output.split())
