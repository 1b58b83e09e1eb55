"""Kernel libraries on a Hopper GPU: streams, clusters, graphs and host arrays."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cpu.runtime.images import bfloat16_twice, cluster_sum, vector_add
from crossfuse.errors import ArtefactRefused
from crossfuse.lower.image import KernelImage
from crossfuse.runtime import LoadedKernel, build_library, load

pytestmark = pytest.mark.gpu

MILLISECOND = 2_000_000  # clock cycles, about


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[KernelImage], LoadedKernel]:
    """Build and load an image."""
    folder = tmp_path_factory.mktemp("libraries")
    return lambda image: load(build_library(image, folder).shared_object)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def test_host_arrays(built: Callable[[KernelImage], LoadedKernel]) -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 4, 128), np.float32)
    kernel = built(vector_add())
    np.testing.assert_array_equal(kernel.run(a, b), a + b)
    out = np.empty_like(a)
    kernel(a, b, out)
    np.testing.assert_array_equal(out, a + b)


def test_host_arrays_of_bfloat16(built: Callable[[KernelImage], LoadedKernel]) -> None:
    x = np.linspace(-3, 3, 128).astype(ml_dtypes.bfloat16)
    result = built(bfloat16_twice()).run(x)
    assert result.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(result, x + x)


def test_device_tensors(built: Callable[[KernelImage], LoadedKernel], torch: Any) -> None:
    a, b = torch.randn(2, 4, 128, device="cuda")
    kernel = built(vector_add())
    assert torch.equal(kernel.run(a, b), a + b)
    x = torch.randn(128, device="cuda").bfloat16()
    assert torch.equal(built(bfloat16_twice()).run(x), x + x)
    with pytest.raises(ArtefactRefused, match="argument-alignment: argument 1 'B'"):
        kernel.run(a, torch.randn(513, device="cuda")[1:].view(4, 128))


def test_the_current_stream_is_used(
    built: Callable[[KernelImage], LoadedKernel], torch: Any
) -> None:
    kernel = built(vector_add())
    source = torch.ones(4, 128, device="cuda")
    a, c = torch.zeros(2, 4, 128, device="cuda")
    kernel(a, source, c)  # loads the cubin, so that the call below only launches
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50 * MILLISECOND)
        a.copy_(source)
        kernel(a, source, c)
    stream.synchronize()
    # On any other stream the kernel would have run before the copy and added to zeros.
    assert bool((c == 2).all())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
def test_clusters_exchange_tiles(built: Callable[[KernelImage], LoadedKernel], size: int) -> None:
    kernel = built(cluster_sum(size, clusters=40))
    x = np.random.default_rng(size).integers(-99, 99, (40, size, 128)).astype(np.float32)
    expected = np.broadcast_to(x.sum(1, keepdims=True), x.shape)
    np.testing.assert_array_equal(kernel.run(x), expected)


def test_clusters_that_fit_are_counted(built: Callable[[KernelImage], LoadedKernel]) -> None:
    counts = [
        built(cluster_sum(size, shared_bytes=200_000)).max_active_clusters() for size in (1, 4, 16)
    ]
    assert counts[0] >= 100  # one CTA fills an SM
    assert 0 < counts[2] < counts[1] < counts[0]


def test_the_first_call_may_be_captured(
    built: Callable[[KernelImage], LoadedKernel], torch: Any
) -> None:
    kernel = built(vector_add(rows=6))
    a, b = torch.randn(2, 6, 128, device="cuda")
    c = torch.zeros(6, 128, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(a, b, c)
    assert not c.any()
    del kernel  # a graph keeps running the functions of a library that nobody holds
    graph.replay()
    assert torch.equal(c, a + b)


@pytest.mark.parametrize("rule", ["skinny.schedule_skinny", "tiled_gemm.schedule_tiled_gemm"])
def test_text_is_compiled_by_us_alone(rule: str) -> None:
    """TVM compiles what it writes where there is a driver, but for kernels that we lower."""
    import tvm

    from crossfuse.hardware import device
    from crossfuse.lower.extract import lower
    from crossfuse.workload import parse, prim_func

    module, name = rule.split(".")
    schedule_product = getattr(import_module(f"crossfuse.schedule.rules.{module}"), name)
    schedule = schedule_product(prim_func(parse("gemm:M=1,K=512,N=256,weights=nk")))
    lower(schedule, device())  # puts its own function before the one that is watched below
    hook, texts = "tvm_callback_cuda_compile", []
    before = tvm.get_global_func(hook)

    def watched(code: str) -> Any:
        texts.append(found := before(code))
        return found

    tvm.register_global_func(hook, watched, override=True)
    try:
        lower(schedule, device())
    finally:
        tvm.register_global_func(hook, before, override=True)
    assert texts == [b""]
