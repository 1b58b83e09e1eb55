"""Images that ask for more than a device has are refused before anything is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpu.runtime.images import cluster_sum, vector_add
from crossfuse.errors import LoweringRefused
from crossfuse.lower.image import KernelImage
from crossfuse.runtime import build_library


def refusal(image: KernelImage, folder: Path) -> str:
    with pytest.raises(LoweringRefused) as caught:
        build_library(image, folder)
    return str(caught.value)


def changed(**changes: Any) -> KernelImage:
    image = cluster_sum(4)
    return replace(image, launches=(replace(image.launches[0], **changes),))


@pytest.mark.parametrize(
    ("image", "text"),
    [
        (
            changed(cluster=(32, 1, 1), grid=(32, 1, 1)),
            "cluster-extent: kernel 'sum_kernel' of cluster_sum_4: found cluster (32, 1, 1); "
            "limit: 16 CTAs. Instead: bind a smaller loop to the cluster.",
        ),
        (
            changed(grid=(2, 1, 1)),
            "cluster-extent: kernel 'sum_kernel' of cluster_sum_4: found grid (2, 1, 1) with "
            "cluster (4, 1, 1); limit: a grid that is a multiple of the cluster along each axis. "
            "Instead: count CTAs, not clusters, in the grid.",
        ),
        (
            changed(block=(64, 32, 1)),
            "launch-block: kernel 'sum_kernel' of cluster_sum_4: found block (64, 32, 1); limit: "
            "1024 threads, and 64 along z. Instead: bind fewer threads.",
        ),
        (
            changed(grid=(4, 65536, 1)),
            "launch-grid: kernel 'sum_kernel' of cluster_sum_4: found grid (4, 65536, 1), block "
            "(128, 1, 1), cluster (4, 1, 1); limit: extents of at least 1 and a grid of at most "
            "(2147483647, 65535, 65535). Instead: change the tile sizes.",
        ),
        (
            changed(arguments=("X", "Z")),
            "image-arguments: kernel 'sum_kernel' of cluster_sum_4: found Z; limit: names of "
            "buffers and tensor maps: X, Y. Instead: add the missing buffers to the image.",
        ),
        (
            changed(dynamic_shared_bytes=232449),
            "shared-memory: kernel 'sum_kernel' of cluster_sum_4: found 232449 bytes (0 static, "
            "232449 dynamic); limit: 232448 bytes of one CTA. Instead: use smaller tiles or fewer "
            "pipeline stages.",
        ),
        (
            changed(symbol="absent"),
            "image-symbol: kernel 'absent' of cluster_sum_4: found a cubin of sum_kernel; limit: a "
            'cubin with every launched kernel. Instead: declare the kernel extern "C" __global__ '
            "in the CUDA text.",
        ),
        (
            replace(vector_add(), launches=()),
            "image-launches: vector_add: found no launch; limit: at least 1. Instead: bind its "
            "loops.",
        ),
        (
            replace(vector_add(), name="a-b"),
            "image-name: a-b: found 'a-b'; limit: a C identifier. Instead: rename it.",
        ),
        (
            replace(vector_add(), buffers=vector_add().buffers[:1] * 2),
            "image-buffers: vector_add: found A, A; limit: distinct names. Instead: rename the "
            "buffers.",
        ),
    ],
)
def test_images_that_no_device_can_run(image: KernelImage, text: str, tmp_path: Path) -> None:
    assert refusal(image, tmp_path) == text
    assert list(tmp_path.iterdir()) == []


def test_types_that_no_argument_may_have(tmp_path: Path) -> None:
    image = vector_add()
    strange = replace(image, buffers=(replace(image.buffers[0], dtype="int4"), *image.buffers[1:]))
    text = refusal(strange, tmp_path)
    assert text.startswith("argument-dtype: buffer 'A' of vector_add: found int4; limit: int8, ")
    assert text.endswith("Instead: convert the tensor at the boundary of the function.")


def test_registers_beyond_one_cta(tmp_path: Path) -> None:
    heavy = (
        'extern "C" __global__ void __launch_bounds__(128) add_kernel(const float* a, '
        "const float* b, float* c) { float r[160]; for (int i = 0; i < 160; ++i) r[i] = a[i]; "
        "__syncthreads(); float s = 0; for (int j = 0; j < 4; ++j) for (int i = 0; i < 160; ++i) "
        "{ r[i] = r[i] * b[j] + r[(i + 1) % 160]; s += r[i]; } c[threadIdx.x] = s; }"
    )
    image = vector_add()
    wide = replace(image, cuda=heavy, launches=(replace(image.launches[0], block=(1024, 1, 1)),))
    text = refusal(wide, tmp_path)
    assert text.startswith("registers: kernel 'add_kernel' of vector_add: found ")
    assert text.endswith(
        "registers in each of 1024 threads; limit: 65536 registers of one CTA. Instead: set launch "
        "bounds, bind fewer threads, or use smaller tiles."
    )
