"""Kernels of a Relax module that follow another one start early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from crossfuse import compile_model
from crossfuse.emulate.cuda import Link, chain, emulate
from crossfuse.lower.extract import lower
from crossfuse.markers import constant_parameters, starts_early
from crossfuse.relax import BuildKernels, FuseCascades, FuseChains, build_kernels, import_torch
from crossfuse.relax.calls import calls_of, with_early_starts
from crossfuse.runtime.artefact import OBJECTS
from crossfuse.runtime.kernel import FIRST

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.cpu

D, H, ROWS = 64, 128, 64
TARGET = "nvidia-h100"


class Layer(nn.Module):
    """A gated network whose rows a softmax makes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(D, H, bias=False) for _ in range(2))
        self.down = nn.Linear(H, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1) + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Functions that the pass builds; nothing is compiled."""
    found: dict[str, Any] = {}

    def built(kind: Any, given: Mapping[str, Any], *_: Any) -> tuple[()]:
        assert kind is OBJECTS
        found.update(given)
        return ()

    monkeypatch.setattr(build_kernels, "built", built)
    return found


def lowered(model: nn.Module, x: torch.Tensor, early: bool = True) -> tuple[Any, Any]:
    imported = import_torch(model.eval(), (x,))
    passes = [
        FuseChains(TARGET, always=True, weights=tuple(imported.params)),
        relax.transform.LegalizeOps(),
        FuseCascades(TARGET),
        BuildKernels(TARGET, early=early),
    ]
    return imported, tvm.ir.transform.Sequential(passes)(imported.mod)


def calls(mod: Any) -> list[tuple[str, list[str], str]]:
    """Names of kernels, of what they are given and of what they make, in order."""
    (block,) = mod["main"].body.blocks
    return [
        (
            str(e.value.args[0].global_symbol),
            [str(x.name) for x in e.value.args[1]],
            str(e.var.name),
        )
        for e in block.bindings
        if isinstance(e.value, Call) and e.value.op.name == "relax.call_dps_packed"
    ]


@pytest.mark.slow
def test_layers_follow_each_other(functions: dict[str, Any]) -> None:
    torch.manual_seed(7)
    model, x = nn.Sequential(Layer(), Layer()).half(), torch.randn(ROWS, D).half()
    imported, mod = lowered(model, x)
    made = calls(mod)
    # Of two functions: each starts early in its second call, networks in their first one too.
    own = [name for name, _, _ in made]
    assert own == ["softmax_first", "crossfuse_gated_ffn", "softmax", "crossfuse_gated_ffn"]
    assert {name: constant_parameters(func) for name, func in functions.items()} == {
        "softmax": (),
        "crossfuse_gated_ffn": ("B_gate", "B_up", "D"),
    }
    links = []
    for name, given, output in made:
        func = functions[name.removesuffix(FIRST)]
        image = lower(func, name=name.removesuffix(FIRST)).image
        names = dict(zip([each.name for each in image.buffers], (*given, output), strict=True))
        links.append(Link(image.as_first() if name.endswith(FIRST) else image, names))
    names = [str(each.name) for each in mod["main"].params]
    arrays = [x.numpy(), *map(np.asarray, imported.params.values())]
    report = emulate(chain(links), dict(zip(names, arrays, strict=True)), orders=2)
    report.raise_if_wrong()
    assert report.at_once == 4
    with torch.no_grad():
        eager, exact = model(x).double(), model.double()(x.double())
    error = np.abs(report.outputs[made[-1][-1]] - exact.numpy()).max()
    assert error <= 2 * (eager - exact).abs().max() + 1e-6


class Beside(nn.Module):
    """Three networks, of which one follows another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def network(of: Layer, x: torch.Tensor) -> torch.Tensor:
            return of.down(F.silu(of.gate(x)) * of.up(x))

        return network(self.second, x), network(self.second, network(self.first, x))


def test_only_what_follows_starts_early(functions: dict[str, Any]) -> None:
    _, mod = lowered(Beside().half(), torch.randn(16, D).half())
    own = [name for name, _, _ in calls(mod)]
    assert sorted(own) == ["crossfuse_gated_ffn", *["crossfuse_gated_ffn_first"] * 2]


@I.ir_module(check_well_formed=False)
class Written:
    """A kernel that is called four times; what lies between writes one of its weights."""

    @T.prim_func(private=True, s_tir=True)
    def kernel(
        A: T.Buffer((4,), "float32"), W: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")
    ):
        T.func_attr({"crossfuse.kernel": True})
        for i in range(4):
            C[i] = A[i] + W[i]

    @T.prim_func(private=True, s_tir=True)
    def more(W: T.Buffer((4,), "float32")):
        for i in range(4):
            W[i] = W[i] + T.float32(1)

    @R.function
    def main(
        x: R.Tensor((4,), "float32"),
        w: R.Tensor((4,), "float32"),
        cache: R.Tensor((4,), "float32"),
    ):
        cls = Written
        a = R.call_tir(cls.kernel, (x, w), out_ty=R.Tensor((4,), "float32"))
        b = R.call_tir(cls.kernel, (a, w), out_ty=R.Tensor((4,), "float32"))
        more = R.call_tir_inplace(cls.more, (cache,), [0], out_ty=R.Tensor((4,), "float32"))
        c = R.call_tir(cls.kernel, (more, cache), out_ty=R.Tensor((4,), "float32"))
        d = R.call_tir(
            cls.kernel, (R.const(np.zeros(4, "float32")), b), out_ty=R.Tensor((4,), "float32")
        )
        return (c, d)


def test_what_the_function_writes_is_no_constant() -> None:
    found = {str(var.name): each for var, each in calls_of(Written).items()}
    follows = {name: each.follows for name, each in found.items()}
    assert follows == {"a": False, "b": True, "c": False, "d": True}
    constant = {name: sorted(each.constant) for name, each in found.items()}
    assert constant == {"a": [0, 1], "b": [1], "c": [], "d": [0]}
    (func,) = with_early_starts({"kernel": Written["kernel"]}, ()).values()
    assert not starts_early(func)
    calls = [replace(each, function="kernel") for each in found.values()]
    # What is constant in one call and made by a kernel in another one is waited for in both.
    (func,) = with_early_starts({"kernel": Written["kernel"]}, calls).values()
    assert starts_early(func) and constant_parameters(func) == ()
    (func,) = with_early_starts({"kernel": Written["kernel"]}, calls[:2]).values()
    assert constant_parameters(func) == ("W",)


def test_nothing_starts_early_unasked(functions: dict[str, Any]) -> None:
    model = nn.Sequential(Layer(), Layer()).half()
    _, mod = lowered(model, torch.randn(16, D).half(), early=False)
    assert not any(name.endswith(FIRST) for name, _, _ in calls(mod))
    assert functions and not any(map(starts_early, functions.values()))


@pytest.mark.slow
def test_a_model_calls_both_ways(tmp_path: Path) -> None:
    model, x = nn.Sequential(Layer(), Layer()).half().eval(), torch.randn(16, D).half()
    fn = compile_model(model, (x,), target=TARGET, always=True, early=True)
    lines = [line.split() for line in str(fn.executable.as_text()).splitlines()]
    called = [words[1] for words in lines if words[:1] == ["call"] and "vm." not in words[1]]
    softmax, network = "fused_softmax", "crossfuse_gated_ffn"
    assert called == [f"{softmax}{FIRST}", network, softmax, network]
    fn.export(tmp_path)
    library = (tmp_path / "model.so").read_bytes()
    assert all(f"__tvm_ffi_{name}\0".encode() in library for name in called)
