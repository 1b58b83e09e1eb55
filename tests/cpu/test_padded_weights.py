"""Weights whose rows TMA does not copy are padded once, where nothing can change them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

import tvm  # noqa: E402
from tvm import relax  # noqa: E402

import crossfuse  # noqa: E402
from crossfuse.emulate.cuda import emulate  # noqa: E402
from crossfuse.hardware import device  # noqa: E402
from crossfuse.lower.extract import buffer_specs, lower  # noqa: E402
from crossfuse.planner.families import EAGER  # noqa: E402
from crossfuse.relax import FuseChains, import_torch  # noqa: E402
from crossfuse.relax.pipeline import serial_kernels  # noqa: E402
from crossfuse.runtime import model_artefact  # noqa: E402
from crossfuse.runtime.tensors import to_numpy  # noqa: E402
from crossfuse.schedule.planned import rank_function, schedule_planned  # noqa: E402
from crossfuse.torch import Backend, reports  # noqa: E402
from crossfuse.workload import check, parse, random_inputs  # noqa: E402
from crossfuse.workload.build import aligned, form_of  # noqa: E402

pytestmark = pytest.mark.cpu
K, N, ROWS = 65, 131, 12


class Mlp(nn.Module):
    """Two layers, the scale of one column each; a further result reads the first weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, N), nn.Linear(N, K)
        self.columns = nn.Parameter(torch.rand(1, N) + 0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.gelu(self.up(x)) * self.columns
        return x + self.down(hidden), self.up.weight.amax()


@pytest.fixture
def model() -> tuple[Any, Any]:
    """The module, and rows for it."""
    torch.manual_seed(0)
    return Mlp().half().eval(), torch.randn(ROWS, K).half()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo has compiled nothing before, and nothing is left behind."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def right(got: Any, module: Any, x: Any) -> None:
    with torch.no_grad():
        for ours, due in zip(got, module(x), strict=True):
            ours = ours if isinstance(ours, torch.Tensor) else torch.from_numpy(ours.numpy())
            torch.testing.assert_close(ours, due, atol=4e-3, rtol=4e-3)


def longer(array: Any, shape: tuple[int, ...]) -> Any:
    """An array with zeros behind its rows."""
    return np.pad(array, [(0, due - has) for has, due in zip(array.shape, shape, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ("gemm_chain:M=40,K=65,N=131,L=65,dtype=float16,act=gelu,weights=nk,bias=first", ["A"]),
        ("gemm_chain:M=16,K=64,N=99,L=99,dtype=bfloat16,act=relu", []),
    ],
)
def test_kernels_of_stored_weights_copy_the_rest(text: str, copied: list[str]) -> None:
    spec, target = parse(text), device("nvidia-h100")
    func = aligned(form_of(spec), stored={*spec.inputs} - {"A"})
    plans = rank_function(func, target)
    plan = next(each for each in plans if each.family != EAGER)
    assert ("padding" in plan.terms) == bool(copied)
    schedule = schedule_planned(func, plan)
    image, inputs = lower(schedule, target).image, random_inputs(spec)
    assert [each.name for each in image.workspaces if each.name.endswith("_padded")] == [
        f"{each}_padded" for each in copied
    ]
    given = {
        each.name: longer(inputs[each.name], each.shape)
        for each in buffer_specs(next(iter(schedule.mod.functions.values())))
        if not each.output
    }
    assert given["D"].shape != inputs["D"].shape
    report = emulate(image, given, orders=1)
    report.raise_if_wrong()
    check(spec, inputs, report.outputs["out"])


def test_not_to_fuse_is_of_the_rows_as_they_are() -> None:
    form = form_of(parse("gemm_chain:M=64,K=1024,N=1023,L=1023,dtype=bfloat16"))
    funcs = (aligned(form), aligned(form, stored={"B", "D"}))
    plans = [rank_function(each, device("nvidia-h100"), keep=1) for each in funcs]
    (copied, stored) = ({each.family: each.microseconds for each in found} for found in plans)
    assert copied[EAGER] == stored[EAGER]
    both = copied.keys() & stored.keys() - {EAGER}
    assert both and all(stored[each] < copied[each] for each in both)


def pads_of(fn: Any) -> Counter[str]:
    """Counts calls of the model's functions that pad."""
    seen: Counter[str] = Counter()

    def note(_func: Any, name: str, before: bool, *_args: Any) -> int:
        seen[name] += before and "pad" in name
        return 0

    fn._machine.set_instrument(note)
    return seen


@pytest.mark.slow
def test_a_model_pads_its_weights_once(model: tuple[Any, Any], tmp_path: Path) -> None:
    module, x = model
    fn = crossfuse.compile_model(module, (x,), always=True, runs_on="llvm")
    assert fn.report.fused == ("crossfuse_gemm_chain",)
    seen = pads_of(fn._running)
    for _ in range(3):
        right(fn(x), module, x)
    # Of both weights, the bias of the first layer, and the scale.
    assert seen.total() == 4
    fn.export(tmp_path)
    loaded = crossfuse.load_model(tmp_path)
    again = pads_of(loaded)
    for _ in range(2):
        right(loaded(x), module, x)
    assert again.total() == 4


def test_weights_that_torch_can_change_are_padded_anew(
    model: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch has on the GPU is not copied there; so it is here on the CPU."""
    module, x = model
    fn = crossfuse.compile_model(module, (x,), always=True, runs_on="llvm")
    named = {f"p_{name.replace('.', '_')}": each for name, each in module.named_parameters()}
    monkeypatch.setattr(model_artefact.RunningModel, "_shares", lambda _self, _value: True)
    monkeypatch.setattr(model_artefact, "check_first_gpu", lambda _index: None)
    fn.export(tmp_path, weights=False)
    loaded = crossfuse.load_model(tmp_path, weights=named)
    seen = pads_of(loaded)
    right(loaded(x), module, x)
    module.up.weight.data.mul_(2)
    module.down.bias.data.add_(1)
    right(loaded(x), module, x)
    assert seen.total() == 8


def run(mod: Any, *given: Any) -> Any:
    made = serial_kernels(relax.transform.LegalizeOps()(mod))
    machine: Any = relax.VirtualMachine(tvm.compile(made, target="llvm"), tvm.cpu())
    return machine["main"](*(tvm.runtime.tensor(to_numpy(each)) for each in given))


@pytest.mark.slow
@pytest.mark.parametrize("bound", [True, False], ids=["constants", "parameters"])
def test_constants_are_padded_in_the_module(model: tuple[Any, Any], bound: bool) -> None:
    """Parameters of which nobody says that they stay the same are left to the kernel."""
    module, x = model
    imported = import_torch(module, (x,))
    mod, params = imported.mod, dict(imported.params)
    mod = relax.transform.BindParams("main", params)(mod) if bound else mod
    fused = FuseChains("nvidia-h100", always=True)(mod)
    assert "crossfuse_gemm_chain" in fused["main"].script()
    assert "pad" not in fused["main"].script()
    passed = [shape for each in fused.functions.values() for shape in shapes_of(each)]
    assert ((N, 72) in passed, (K, 136) in passed) == (bound, bound)
    given = [] if bound else [torch.from_numpy(each) for each in params.values()]
    right(run(fused, x, *given), module, x)


def shapes_of(function: Any) -> list[tuple[int, ...]]:
    """Shapes of the arguments of a kernel."""
    if isinstance(function, relax.Function):
        return []
    return [each.shape for each in buffer_specs(function)]


def graphs_of(monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """Counts operators of each graph that inductor is given."""
    from torch._inductor import compile_fx

    seen: list[Counter[str]] = []
    plain = compile_fx.compile_fx_inner

    def noted(graph: Any, *args: Any, **named: Any) -> Any:
        calls = (each for each in graph.graph.nodes if each.op == "call_function")
        seen.append(Counter(str(each.target) for each in calls))
        return plain(graph, *args, **named)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", noted)
    return seen


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_torch_pads_frozen_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models of one structure: what inductor keeps of the first has not its weights."""
    from torch._inductor import config

    seen, x = graphs_of(monkeypatch), torch.randn(ROWS, K).half()
    # On the CPU inductor would otherwise pack weights for its own products.
    with torch.no_grad(), config.patch({"freezing": True, "cpp.weight_prepack": False}):
        for _ in range(2):
            torch.compiler.reset()
            module = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)).half().eval()
            fn = torch.compile(module, backend=Backend(always=True, cpu="llvm"))
            right([fn(x)], lambda given, module=module: [module(given)], x)
            assert "B[65, 136] D[131, 72]" in reports()[-1].text()
    assert seen == [{"crossfuse.run.default": 1}] * 2


CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "copy_": lambda module, other: [
        a.copy_(b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    ],
    "data.copy_": lambda module, other: [
        a.data.copy_(b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    ],
    "data": lambda module, other: [
        setattr(a, "data", b.data)
        for a, b in zip(module.parameters(), other.parameters(), strict=True)
    ],
    "load_state_dict": lambda module, other: module.load_state_dict(other.state_dict()),
}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_torch_reads_weights_that_are_not_frozen_at_each_call(rest: str) -> None:
    """Not by torch's count of versions, which ``data`` does not add to."""
    x = torch.randn(ROWS, K).half()
    module = Mlp().half().eval()
    with torch.no_grad():
        fn = torch.compile(module, backend=Backend(rest=rest, always=True, cpu="llvm"))
        right(fn(x), module, x)
        assert "B[131, 65] D[65, 131]" in reports()[-1].text()
        for change in CHANGES.values():
            change(module, Mlp().half())
            right(fn(x), module, x)
