"""What the worker does with each kind of way, on the CPU and without a clock."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossfuse.schema import typed

torch = pytest.importorskip("torch")

from crossfuse.bench.job import Variant  # noqa: E402
from crossfuse.bench.problem import DrawnProblem  # noqa: E402
from crossfuse.bench.worker import Session  # noqa: E402
from crossfuse.measure import timing  # noqa: E402
from crossfuse.measure.job import GRAPH, LIBRARY, PROGRAM, SPEC, Given, Request, Timing, Way  # noqa: E402  # noqa: E402


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every call runs once and takes a microsecond; results are kept."""
    made: list[Any] = []

    def steps(how: timing.TimingConditions, bound: Any) -> list[timing.Step]:
        made.extend(each() for each in bound)
        return [timing.Step(bound[0], 1)]

    monkeypatch.setattr(timing, "COLD_BYTES", 40_000)
    monkeypatch.setattr(timing, "steps", steps)
    monkeypatch.setattr(timing, "measure", lambda how, timed, device: [1.0])
    return made


def timed(way: Way) -> Any:
    request = json.loads(json.dumps(asdict(Request(way=way))))
    found = typed(Timing, Session("cpu").serve(request))
    assert found.status == "ok", found.message
    return found


@pytest.mark.parametrize(
    "text",
    [
        "gated_ffn:M=4,K=64,N=32,L=16,act=gelu,weights=nk",
        "gemm_chain:M=4,K=64,N=32,L=16,act=relu,bias=first+last",
        "gated_gemm:M=4,K=64,N=32,bias=last",
        "softmax:rows=4,cols=64",
        "cross_entropy:rows=4,cols=64",
        "rmsnorm_gemm:tokens=4,K=64,N=32",
    ],
)
def test_workloads(text: str, no_clock: list[Any]) -> None:
    assert timed(Way(SPEC, text)).microseconds == 1.0
    assert len(no_clock) > 1  # each on inputs of its own
    assert all(torch.isfinite(each.float()).all() for each in no_clock)


def test_a_graph_gets_the_strides_that_it_has_in_the_model(
    tmp_path: Path, no_clock: list[Any]
) -> None:
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "weight")]
    graph.output(graph.call_function(torch.ops.aten.mm.default, tuple(nodes)))
    path = tmp_path / "graph.pt"
    torch.save(torch.fx.GraphModule(torch.nn.Module(), graph), path)
    given = (Given((4, 64), "float32", (64, 1), False), Given((64, 32), "float32", (1, 64)))
    assert timed(Way(GRAPH, str(path), given)).microseconds == 1.0
    assert len(no_clock) == timing.copies_needed(64 * 32 * 4, timing.CALLS, "cold")
    assert all(torch.equal(each, no_clock[0]) for each in no_clock)
    problem = DrawnProblem(dict(zip("xy", given, strict=True)))
    bound = problem.bind(Variant(lambda *given: given), timing.TimingConditions(), "cpu")
    first, second = (call() for call in bound.calls[:2])
    assert first[0] is second[0]
    assert first[1] is not second[1]
    assert second[1].stride() == (1, 64)


def test_a_program_runs_on_copies_of_its_weights(tmp_path: Path, no_clock: list[Any]) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU()).eval()
    x = torch.zeros(4, 64)
    path = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(module, (x,)), path)
    given = (Given((4, 64), "float32", cold=False),)
    assert timed(Way(PROGRAM, str(path), given)).microseconds == 1.0
    assert len(no_clock) > 1
    assert no_clock[0].shape == (4, 32)


def test_a_library(monkeypatch: pytest.MonkeyPatch, no_clock: list[Any]) -> None:
    class Kernel:
        manifest = SimpleNamespace(launches=(), resources=())

        def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x.float() @ weight.float()

    monkeypatch.setattr("crossfuse.runtime.load", lambda path, check_device: Kernel())
    given = (Given((4, 64), "bfloat16", cold=False), Given((64, 32), "bfloat16"))
    assert timed(Way(LIBRARY, "a.so", given)).microseconds == 1.0
    assert len(no_clock) > 1
