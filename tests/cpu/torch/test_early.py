"""Kernels that follow another one start early: which do, and what they load before they wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn, F, fx = torch.nn, torch.nn.functional, torch.fx
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from crossfuse.emulate.cuda import EmulationReport, Link, chain, emulate  # noqa: E402
from crossfuse.lower.extract import lower  # noqa: E402
from crossfuse.lower.image import starting_early  # noqa: E402
from crossfuse.markers import constant_parameters, starts_early  # noqa: E402
from crossfuse.torch import Backend, fuse_graph, kernels  # noqa: E402
from crossfuse.torch.graph_cache import Record  # noqa: E402
from crossfuse.torch.rewrite import Call  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_caches")]

D, H, ROWS = 64, 128, 64
WEIGHTS = ("B_gate", "B_up", "D")
Tensor = torch.Tensor


def ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def weights(count: int) -> list[Tensor]:
    torch.manual_seed(7)
    shapes = [(H, D), (H, D), (D, H)] * count
    return [torch.randn(shape, dtype=torch.float16) / 8 for shape in shapes]


def layers(x: Tensor, *given: Tensor) -> Tensor:
    for first in range(0, len(given), 3):
        x = ffn(x, *given[first : first + 3])
    return x


@dataclass
class Made:
    """What became of a graph: its calls, and the functions that they call."""

    module: fx.GraphModule
    record: Record
    functions: dict[str, Any]

    @property
    def calls(self) -> list[tuple[Call, kernels.KeptKernel, Any]]:
        """Each call with its kernel and its function, in the order of the graph."""
        kept = {each.key: each for each in self.record.kernels}
        return [(e, kept[e.key], self.functions[kept[e.key].name]) for e in self.record.calls]

    @property
    def starts(self) -> list[tuple[bool, tuple[str, ...]]]:
        """Of each call whether it starts early, and what it then loads before it waits."""
        return [
            (starts_early(func) and not kernel.first, constant_parameters(func))
            for _, kernel, func in self.calls
        ]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Made]:
    """Fuse a function of tensors as the backend does."""
    offered = fuse_graph.offer_kernels
    functions: dict[str, Any] = {}

    def offer(replacements: Sequence[Any], given: Mapping[Any, Any], *where: Any) -> Any:
        functions.update({str(name.name_hint): func for name, func in given.items()})
        return offered(replacements, given, *where)

    monkeypatch.setattr(fuse_graph, "offer_kernels", offer)

    def fuse(
        function: Any, x: Tensor, *inputs: Tensor, cpu: str = "llvm", early: bool = True
    ) -> Made:
        with torch.no_grad():
            module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(x, *inputs)
        backend = Backend("eager", True, "nvidia-h100", cpu, early=early)
        if cpu == "build":  # what is built is cached
            record = backend.fuse(module)
            assert record is not None
        else:
            record, _ = fuse_graph.fuse_graph(module, backend, backend.device_of(x.device), True)
        return Made(module, record, functions)

    return fuse


def emulated(made: Made, inputs: Mapping[str, Tensor], **planted: Any) -> EmulationReport:
    """All calls of a graph as one chain; `planted` functions stand for those of their names."""
    links = []
    for call, kernel, func in made.calls:
        image = lower(planted.get(kernel.name, func), name=kernel.name).image
        names = dict(
            zip([each.name for each in image.buffers], (*call.inputs, *call.outputs), strict=True)
        )
        links.append(Link(image.as_first() if kernel.first else image, names))
    return emulate(chain(links), {name: each.numpy() for name, each in inputs.items()}, orders=2)


def named(made: Made, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    names = [each.name for each in made.module.graph.nodes if each.op == "placeholder"]
    return dict(zip(names, inputs, strict=True))


@pytest.mark.slow
def test_layers_follow_each_other(fused: Callable[..., Made]) -> None:
    x, given = torch.randn(ROWS, D).half(), weights(3)
    made = fused(layers, x, *given, cpu="build")
    assert made.starts == [(False, WEIGHTS), (True, WEIGHTS), (True, WEIGHTS)]
    first, *others = [kernel for _, kernel, _ in made.calls]
    # One library, called in two ways.
    assert first.first and not any(each.first for each in others)
    assert len({each.kept_as for each in (first, *others)}) == 1
    report = emulated(made, named(made, (x, *given)))
    report.raise_if_wrong()
    assert report.launches == 3 and report.at_once == 3
    exact = layers(x.double(), *(each.double() for each in given))
    error = np.abs(report.outputs[made.calls[-1][0].outputs[0]] - exact.numpy()).max()
    assert error <= 2 * (layers(x, *given).double() - exact).abs().max() + 1e-6
    # A second start finds both ways to call it.
    kernels._KEPT.clear()
    again = fused(layers, x, *given, cpu="build")
    assert again.record == made.record
    assert {*kernels._KEPT} == {each.key for each in made.record.kernels}


@pytest.mark.slow
def test_what_another_kernel_makes_is_waited_for(fused: Callable[..., Made]) -> None:
    """The second network has the result of the first one as a weight."""

    def function(x: Tensor, y: Tensor, *given: Tensor) -> Tensor:
        return ffn(y, ffn(x, *given[:3]), *given[3:])

    x, y = torch.randn(H, D).half(), torch.randn(H, D).half()
    given = [each for number, each in enumerate(weights(2)) if number != 3]
    made = fused(function, x, y, *given)
    (_, _, func), _ = made.calls
    others = ("A", "B_up", "D")  # rows of both are given; they are loaded behind the wait
    assert made.starts == [(False, others), (True, others)]
    inputs = named(made, (x, y, *given))
    report = emulated(made, inputs)
    report.raise_if_wrong()
    assert report.at_once == 2
    name = made.calls[0][1].name
    wrong = emulated(made, inputs, **{name: starting_early(func, WEIGHTS)})
    assert {each.kind for each in wrong.findings} == {"early-launch"}
    assert wrong.findings[0].buffer == made.calls[0][0].outputs[0]


def without(starts: list[tuple[bool, tuple[str, ...]]], name: str) -> None:
    expected = tuple(each for each in WEIGHTS if each != name)
    assert starts == [(False, expected), (True, expected)]


def test_what_the_graph_makes_or_writes_is_no_constant(fused: Callable[..., Made]) -> None:
    x, given = torch.randn(16, D).half(), weights(2)

    def summed(x: Tensor, *given: Tensor) -> Tensor:
        return layers(x, *given[:3], given[3].cumsum(0), *given[4:])

    without(fused(summed, x, *given).starts, "B_gate")
    strided = given[5].t().contiguous().t()  # which is copied for the kernel
    without(fused(layers, x, *given[:5], strided).starts, "D")

    def written(x: Tensor, *given: Tensor) -> Tensor:
        made = layers(x, *given)
        given[4].view(-1)[:D].copy_(made[0])
        return made

    without(fused(written, x, *given).starts, "B_up")


def test_kernels_that_do_not_need_each_other_do_not_follow(fused: Callable[..., Made]) -> None:
    def beside(x: Tensor, *given: Tensor) -> Tensor:
        return layers(x, *given[:3]), layers(x, *given[3:])

    x, given = torch.randn(16, D).half(), weights(2)
    assert fused(beside, x, *given).starts == [(False, ())] * 2
    assert fused(layers, x, *given, early=False).starts == [(False, ())] * 2


def test_torch_between_kernels(fused: Callable[..., Made]) -> None:
    """What torch launches in between waits for its own; the kernel behind it for that."""

    def function(x: Tensor, *given: Tensor) -> Tensor:
        x = layers(x, *given[:3]).cumsum(0)
        return layers(x, *given[3:])

    x, given = torch.randn(16, D).half(), weights(2)
    assert fused(function, x, *given).starts == [(False, WEIGHTS), (True, WEIGHTS)]


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_the_backend_computes_the_same(rest: str) -> None:
    x, given = torch.randn(16, D).half(), weights(2)
    results = []
    for early in (False, True):
        torch.compiler.reset()
        fn = torch.compile(layers, backend=Backend(rest, True, cpu="llvm", early=early))
        with torch.no_grad():
            results.append(fn(x, *given))
    assert torch.equal(*results)
