"""Models through torch.compile and through Relax on the GPU: right, capturable, on any stream."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

import crossfuse  # noqa: E402
from crossfuse.torch import Backend, compile_ahead, replace_mlp, reports  # noqa: E402

D, H, LAYERS = 2048, 5632, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.gate, self.up = (nn.Linear(D, H, bias=False) for _ in range(2))
        self.down = nn.Linear(H, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def compiled(rows: int, **options: Any) -> tuple[Any, Any, Any]:
    torch.compiler.reset()
    module = nn.Sequential(*(Layer() for _ in range(LAYERS))).cuda().bfloat16().eval()
    x = torch.randn(rows, D, device="cuda").bfloat16()
    return module, torch.compile(module, backend=Backend(**options)), x


def check(module: Any, got: Any, x: Any) -> None:
    # Of a copy: weights that are converted in inference mode are other tensors to torch's guards.
    eager, exact = module(x).double(), copy.deepcopy(module).double()(x.double())
    assert (got.double() - exact).abs().max() <= 2 * (eager - exact).abs().max()


def one_kernel_a_layer(fused: tuple[str, ...], end: str = "") -> None:
    # With its norm, without it, with the product behind it, or of few rows the last product by
    # itself: what is told faster.
    names = ("gated_ffn", "rows_chain", "layers", "gated_gemm")
    kinds = {f"crossfuse_{each}{end}" for each in names}
    first = [each for each in fused if not each.startswith("crossfuse_gemm")]
    assert len(first) == LAYERS and kinds.issuperset(first), fused


@pytest.mark.parametrize("rows", [1, 16, 128])
@pytest.mark.parametrize("rest", ["inductor", "eager"])
def test_layers(rows: int, rest: str) -> None:
    module, fn, x = compiled(rows, rest=rest, always=True)
    with torch.inference_mode():
        check(module, fn(x), x)
    one_kernel_a_layer(reports()[-1].fused)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_of_inductor(mode: str) -> None:
    torch.compiler.reset()
    module = nn.Sequential(*(Layer() for _ in range(LAYERS))).cuda().bfloat16().eval()
    fn = torch.compile(module, backend="crossfuse", mode=mode)
    for _ in range(4):  # the third call replays what the second one recorded
        x = torch.randn(16, D, device="cuda").bfloat16()
        with torch.inference_mode():
            check(module, fn(x).clone(), x)
    assert reports()[-1].fused


def test_one_row_is_fused_where_inductor_writes_products_as_sums() -> None:
    torch.compiler.reset()
    module = nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.Linear(D, D, bias=False))
    module = module.cuda().bfloat16().eval()
    # Of one row, single products are the faster groups; without them it is the whole network.
    backend = Backend(always=True, products=False, mode="max-autotune-no-cudagraphs")
    fn, x = torch.compile(module, backend=backend), torch.randn(1, D, device="cuda").bfloat16()
    with torch.inference_mode():
        check(module, fn(x), x)
        with torch.profiler.profile() as profile:
            fn(x)
    # The last layer is a kernel, or its last product one with the product behind it.
    fused, called = reports()[-1].fused, [each.name for each in profile.events()]
    assert len(fused) == called.count("crossfuse::run") == LAYERS, fused
    assert "aten::mm" not in called


def test_a_graph_captures_the_model_on_a_stream_of_its_own() -> None:
    module, fn, x = compiled(16, always=True)
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        fn(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = fn(x)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            stream.synchronize()
            check(module, y, x)


@pytest.mark.skipif(
    not hasattr(torch.compiler, "load_compiled_function"), reason="torch writes no programs"
)
def test_a_program_that_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module, _, x = compiled(16)
    for found in (False, True):
        torch.compiler.reset()
        before = len(reports())
        with torch.inference_mode():
            fn = compile_ahead(module, (x,), backend=Backend(always=True))
            assert (fn.found, fn.reason) == (found, "")
            check(module, fn(x), x)
        assert len(reports()) == before + 1 and "usual" not in vars(fn)
        one_kernel_a_layer(reports()[-1].fused)


#: Compiles or loads a module with kernels of Triton; says what became of it.
START = """
import sys
import torch
from crossfuse.torch import Backend, compile_ahead

torch.manual_seed(0)
nn = torch.nn
layers = nn.Linear(256, 512), nn.GELU(), nn.RMSNorm(512), nn.Linear(512, 64, bias=False)
module, x = nn.Sequential(*layers).cuda().half().eval(), torch.randn(16, 256).cuda().half()
with torch.inference_mode():
    fn = compile_ahead(module, (x,), backend=Backend(early=len(sys.argv) > 1))
    y = fn(x)
    assert (y - module(x)).abs().max() < 1e-2 * y.abs().max() and not fn.reason
    hits = torch._dynamo.utils.counters["inductor"]["async_compile_cache_hit"]
    print(fn.found, hits > 0, "torch._inductor.lowering" in sys.modules)
"""


@pytest.mark.skipif(
    not hasattr(torch.compiler, "load_compiled_function"), reason="torch writes no programs"
)
@pytest.mark.parametrize("early", [False, True])
def test_another_process_finds_kernels_of_triton(
    early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that start early torch's own launcher does not take: Triton loads them."""
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    said = [
        subprocess.run(
            [sys.executable, "-c", START, *["early"] * early],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        for _ in range(2)
    ]
    assert said[0].stdout.split()[::2] == ["False", "True"], said[0].stderr
    assert said[1].stdout.split() == ["True", str(not early), "False"], said[1].stderr


@pytest.mark.parametrize("rest", ["inductor", "eager"])
def test_kernels_for_bins_of_rows(rest: str) -> None:
    torch.compiler.reset()
    module = nn.Sequential(*(Layer() for _ in range(LAYERS))).cuda().bfloat16().eval()
    backend = Backend(rest=rest, always=True, bins=(16, 128))
    fn, before = torch.compile(module, backend=backend, dynamic=True), len(reports())
    for shape in ((2, 7), (3, 5), (4, 30), (16, 8), (5, 40)):
        x = torch.randn(*shape, D, device="cuda").bfloat16()
        with torch.inference_mode():
            check(module, fn(x), x)
    assert len(reports()) == before + 1
    one_kernel_a_layer(reports()[-1].fused)


class FFN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.contract(F.gelu(self.expand(x), approximate="tanh"))


def test_mlps_without_torch_compile() -> None:
    module = nn.Sequential(nn.RMSNorm(D), FFN()).cuda().bfloat16().eval()
    done = replace_mlp(module, always=True, bins=(16, 128))
    assert list(done.parts) == ["1"]
    given = [torch.randn(2, rows, D, device="cuda").bfloat16() for rows in (1, 8, 50, 300)]
    with torch.inference_mode():
        got = [module(x) for x in given]
        done.restore()
        for x, y in zip(given, got, strict=True):
            check(module, y, x)


def test_the_virtual_machine_runs_a_model(tmp_path: Path) -> None:
    import tvm
    from tvm import relax

    from crossfuse.hardware import tvm_target
    from crossfuse.relax import import_torch
    from crossfuse.relax.pipeline import pipeline
    from crossfuse.runtime.tensors import to_numpy

    module, _, x = compiled(16)
    imported = import_torch(module.cpu(), [x.cpu()])
    executable = relax.build(imported.mod, tvm_target("nvidia-h100"), relax_pipeline=pipeline())
    given = [to_numpy(x), *imported.params.values()]
    executable.export_library(tmp_path / "model.so")
    for made in (executable, tvm.runtime.load_module(str(tmp_path / "model.so"))):
        machine = relax.VirtualMachine(made, tvm.cuda())
        got = machine["main"](*(tvm.runtime.tensor(each, tvm.cuda()) for each in given)).numpy()
        with torch.inference_mode():
            check(module.cuda(), torch.from_numpy(got.astype("float32")).cuda(), x)


def test_a_model_is_loaded_from_a_folder(tmp_path: Path) -> None:
    module = nn.Sequential(*(Layer() for _ in range(LAYERS))).bfloat16().eval()
    x = torch.randn(16, D).bfloat16()
    crossfuse.compile_model(module, (x,), always=True).export(tmp_path)
    fn, module, x = crossfuse.load_model(tmp_path), module.cuda(), x.cuda()
    with torch.inference_mode():
        check(module, fn(x), x)


def test_a_compiled_model_waits_for_torchs_stream_and_torch_for_it() -> None:
    module = nn.Sequential(*(Layer() for _ in range(LAYERS))).bfloat16().eval()
    given = torch.randn(16, D).bfloat16()
    fn, module = crossfuse.compile_model(module, (given,), always=True), module.cuda()
    given, x = given.cuda(), torch.zeros(16, D, device="cuda").bfloat16()
    fn(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode():
        for _ in range(5):
            x.zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)  # cycles
                x.copy_(given)
                y = fn(x) + 0
            stream.synchronize()
            check(module, y, given)


def test_a_compiled_model_picks_kernels_by_rows() -> None:
    module = nn.Sequential(*(Layer() for _ in range(LAYERS))).bfloat16().eval()
    dims = {0: torch.export.Dim("batch", max=16), 1: torch.export.Dim("length", max=32)}
    example = torch.randn(2, 8, D).bfloat16()
    program = torch.export.export(module, (example,), dynamic_shapes=(dims,))
    fn = crossfuse.compile_model(program, always=True, bins=(16, 128))
    one_kernel_a_layer(fn.report.fused, "_rows")
    module.cuda()
    for shape in ((1, 1), (2, 7), (4, 30), (16, 8), (5, 32)):
        x = torch.randn(*shape, D, device="cuda").bfloat16()
        with torch.inference_mode():
            check(module, fn(x), x)


def test_what_tvm_compiles_has_no_fast_math() -> None:
    class Functions(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x**2, x**5, torch.sin(x * 1e4), x * 1e-39

    x = torch.linspace(-3, 3, 4096)
    fn = crossfuse.compile_model(Functions().eval(), (x,))
    powers = (1e-6, 1e-5)
    for got, due, bound in zip(fn(x.cuda()), Functions()(x), (*powers, 1e-6, 0), strict=True):
        assert (got.cpu() - due).abs().max() <= bound * due.abs().max()


def test_what_is_left_to_tvm_keeps_nan_and_small_numbers() -> None:
    class Functions(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            bounded = torch.relu(x), x.clamp(-1, 1), torch.maximum(x, x.flip(0))
            return *bounded, torch.log1p(x), torch.expm1(x), F.softplus(16 * x)

    x = 10.0 ** torch.linspace(-30, 0.3, 4096)
    x[100] = float("nan")
    fn = crossfuse.compile_model(Functions().eval(), (x,))
    for got, due in zip(fn(x.cuda()), Functions()(x.double()), strict=True):
        torch.testing.assert_close(got.cpu().double(), due, rtol=1e-6, atol=0, equal_nan=True)
