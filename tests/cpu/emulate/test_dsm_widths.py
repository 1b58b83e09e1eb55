"""Every width of remote access that dsm.cuh has, there and back."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cpu.emulate.kernels import DSM_HEADER, clean, image

WORDS = {
    "b8": ("unsigned char", 1),
    "b16": ("unsigned short", 2),
    "b32": ("unsigned", 4),
    "b64": ("uint2", 8),
    "b128": ("uint4", 16),
}
THERE_AND_BACK = """
  extern __shared__ __align__(64) unsigned char pool[];
  WORD* own = (WORD*)pool + threadIdx.x;
  WORD* received = (WORD*)(pool + 32 * sizeof(WORD)) + threadIdx.x;
  int peer = 1 - (int)crossfuse_ptx_cluster_rank();
  *own = ((WORD*)A)[blockIdx.x * 32 + threadIdx.x];
  crossfuse_cluster_sync();
  crossfuse_dsm_store_SUFFIX(received, peer, *own);
  WORD loaded = crossfuse_dsm_load_SUFFIX(own, peer);
  crossfuse_cluster_sync();
  ((WORD*)C)[(blockIdx.x * 2 + 0) * 32 + threadIdx.x] = loaded;
  ((WORD*)C)[(blockIdx.x * 2 + 1) * 32 + threadIdx.x] = *received;
"""


def test_every_width_is_listed() -> None:
    listed = re.findall(r"^CROSSFUSE_DSM_ACCESS\((\w+), ([\w ]+)\)", DSM_HEADER.read_text(), re.M)
    assert dict(listed) == {suffix: word for suffix, (word, _) in WORDS.items()}


@pytest.mark.parametrize("suffix", WORDS)
def test_there_and_back(suffix: str) -> None:
    word, size = WORDS[suffix]
    body = THERE_AND_BACK.replace("WORD", word).replace("SUFFIX", suffix)
    bytes_of_cta = 32 * size
    buffers = [("A", (2, bytes_of_cta), "uint8"), ("C", (2, 2, bytes_of_cta), "uint8")]
    img = image(body, buffers, grid=2, block=32, cluster=2, shared=2 * bytes_of_cta)
    a = np.random.default_rng(0).integers(0, 256, (2, bytes_of_cta), dtype="uint8")
    swapped = np.repeat(a[::-1, None], 2, axis=1)
    np.testing.assert_array_equal(clean(img, a)["C"], swapped)
