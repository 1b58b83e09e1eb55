"""Rows of CTAs that cannot start yet: others make them, and nobody waits for what is in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

import crossfuse
from crossfuse.lower.image import BufferSpec, KernelImage, Launch
from crossfuse.runtime import load
from crossfuse.runtime.artefact import build_library
from crossfuse.workload.cascades import resolve

torch = pytest.importorskip("torch")

#: A CTA of this has an SM for itself, for a fifth of a second.
BLOCKER = """
extern "C" __global__ void __launch_bounds__(32) blocker(int* out) {
  extern __shared__ int room[];
  const long long begin = clock64();
  while (clock64() - begin < 400000000ll) room[threadIdx.x] = 1;
  if (threadIdx.x == 0) out[blockIdx.x] = room[0];
}
"""
SPEC = resolve("rmsnorm_gemm:tokens=256,K=4096,N=12288")


@pytest.mark.parametrize("left", [24, 64, 100], ids="{} SMs".format)
def test_late_rows_are_made_by_others(left: int, tmp_path: Path) -> None:
    from crossfuse.bench.cascades import draw

    # Tiles that are planned for this GPU may have no rows that others make.
    compiled = crossfuse.compile(SPEC, plan=crossfuse.plan(SPEC, "nvidia-h100"))
    assert compiled.lowered.image.launches[0].helps
    inputs = list(draw(SPEC, 0, "cuda").values())
    due = [compiled.kernel.run(*inputs) for _ in range(2)][-1].clone()
    torch.cuda.synchronize()

    ctas = torch.cuda.get_device_properties("cuda").multi_processor_count - left
    launch = Launch("blocker", (ctas, 1, 1), (32, 1, 1), (1, 1, 1), 200 << 10, ("out",))
    image = KernelImage("blocker", BLOCKER, (BufferSpec("out", (ctas,), "int32", True),), (launch,))
    blocker = load(build_library(image, tmp_path).shared_object)
    out = torch.zeros(ctas, dtype=torch.int32, device="cuda")
    torch.cuda._sleep(1)  # a kernel that is first launched beside the blocker waits for it
    streams, ends = [torch.cuda.Stream() for _ in range(2)], [torch.cuda.Event() for _ in range(2)]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        blocker(out)
        ends[0].record()
    torch.cuda._sleep(1_000_000)  # the blocker has started
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(streams[1]):
        found = [compiled.kernel.run(*inputs) for _ in range(4)]
        ends[1].record()
    ends[1].synchronize()
    assert not ends[0].query()  # still in the way
    torch.cuda.synchronize()
    assert out.min() == 1
    again = compiled.kernel.run(*inputs)  # flags count on
    for each in (*found, again):
        assert torch.equal(each.view(torch.int16), due.view(torch.int16))
