"""Kernels on padded copies of their inputs on a GPU: equal runs, the numeric rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

import crossfuse  # noqa: E402
from crossfuse import workload  # noqa: E402
from crossfuse.torch import Backend, reports  # noqa: E402
from gpu.test_cluster_kernels import run_repeatedly  # noqa: E402

SPECS = [
    "gemm_chain:M=128,K=65,N=131,L=65,dtype=float16,act=gelu,weights=nk,bias=first+last",
    "gemm_chain:M=512,K=1001,N=3003,L=1001,dtype=bfloat16,act=relu",
    # The first weights only lack rows: no copy of them is made.
    "gated_ffn:M=33,K=512,N=1003,L=256,dtype=bfloat16",
    "gemm:M=70,K=129,N=45,dtype=float16,bias=last",
]


@pytest.mark.parametrize("text", SPECS)
def test_rows_that_are_no_multiple_of_16_bytes(text: str, tmp_path: Path) -> None:
    compiled = crossfuse.compile(text, rule="tensor", directory=tmp_path)
    run_repeatedly(compiled, workload.parse(text))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(65, 131), nn.Linear(131, 65)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def right(fn: Any, module: Any, x: Any) -> None:
    with torch.inference_mode():
        torch.testing.assert_close(fn(x), module(x), atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("shared", [False, True], ids=["copied", "used where torch has them"])
def test_a_model_pads_its_weights(shared: bool, tmp_path: Path) -> None:
    module, x = Mlp().half().eval(), torch.randn(12, 65).half()
    crossfuse.compile_model(module, (x,), always=True).export(tmp_path)
    module, x = module.cuda(), x.cuda()
    weights = {f"p_{name.replace('.', '_')}": each for name, each in module.named_parameters()}
    fn = crossfuse.load_model(tmp_path, weights=weights if shared else None)
    for _ in range(3):
        right(fn, module, x)
        if shared:
            module.up.weight.data.mul_(1.5)


@pytest.mark.parametrize("mode", ["", "reduce-overhead"])
@pytest.mark.parametrize("freezing", [False, True])
def test_torch_pads_weights(freezing: bool, mode: str) -> None:
    from torch._inductor import config

    torch.compiler.reset()
    module, x = Mlp().half().eval().cuda(), torch.randn(12, 65, device="cuda").half()
    with torch.no_grad(), config.patch({"freezing": freezing}):
        fn = torch.compile(module, backend=Backend(always=True, mode=mode))
        for _ in range(4):
            torch.testing.assert_close(fn(x), module(x), atol=4e-3, rtol=4e-3)
            if not freezing:  # which CUDA graphs see too
                module.up.weight.data.mul_(1.2)
    assert ("B[65, 136]" in reports()[-1].text()) == freezing
