"""Measured choice on the GPU: what is timed runs, the answer is kept, and results stay right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

import crossfuse  # noqa: E402
from crossfuse.hardware import device  # noqa: E402
from crossfuse.measure.job import LIBRARY, SPEC, Given, Way  # noqa: E402
from crossfuse.measure.timer import find_timer, timing  # noqa: E402
from crossfuse.planner.families import ROWS_CHAIN  # noqa: E402
from crossfuse.torch import Backend, reports  # noqa: E402

CHAIN = "gemm_chain:M=64,K=512,N=1024,L=512,act=relu,weights=nk"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("text", [CHAIN, "softmax:rows=512,cols=8192"])
def test_every_way_is_timed_and_the_answer_is_kept(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = crossfuse.compile(text, measure=True)
    found = kernel.measured
    assert found is not None
    times = [each.taken for each in (*found.ours, found.baseline) if each is not None]
    assert len(times) == 5
    assert all(each.microseconds and 0 < each.microseconds < 1000 for each in times), found.text

    def never(index: int) -> Any:
        timer = find_timer(index)
        monkeypatch.setattr(timer, "time", None)
        return timer

    monkeypatch.setattr("crossfuse.measure.timer.find_timer", never)
    assert crossfuse.compile(text, measure=True).measured == found


def test_a_kernel_that_faults_loses_and_the_next_runs(tmp_path: Path) -> None:
    kernel = crossfuse.compile(CHAIN, directory=tmp_path)
    with timing(device()) as timer:
        library = str(kernel.artefact.shared_object)
        shapes = [each.shape for each in kernel.kernel.buffers if not each.output]
        wrong = tuple(Given((1, 1), "bfloat16") for _ in shapes)
        right = tuple(Given(each, "bfloat16") for each in shapes)
        assert timer.time(Way(LIBRARY, library, right)).microseconds
        assert timer.time(Way(LIBRARY, library, wrong)).message
        assert timer.time(Way(LIBRARY, library, right)).microseconds
        for mode in (None, "default"):
            assert timer.time(Way(SPEC, CHAIN, mode=mode)).microseconds


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(512, 1024), nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.contract(F.gelu(self.expand(torch.softmax(x, -1))))


@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_torch_compile(rest: str) -> None:
    torch.compiler.reset()
    module = nn.Sequential(Layer(), Layer()).cuda().bfloat16().eval()
    x = torch.randn(64, 512, device="cuda").bfloat16()
    with torch.inference_mode():
        got = torch.compile(module, backend=Backend(rest=rest, measure=True))(x).double()
        eager = module(x).double()
        exact = module.double()(x.double())
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max()
    measured = [each for each in reports()[-1].outcomes if each.measured]
    # Beside these, a softmax and the chain behind it may have been measured as one kernel.
    first, second = (each for each in measured if each.family != ROWS_CHAIN)
    if rest == "eager":  # Inductor's softmax of the second layer wants float32 of the first.
        assert first.measured == second.measured
    assert first.microseconds and first.eager_microseconds
    # Noise may be more than 2 %, but what is slower is never taken.
    assert not first.name or first.microseconds < first.eager_microseconds
