"""Number formats of the device headers, bit for bit against ml_dtypes and numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cpu.emulate.kernels import clean, image
from crossfuse.emulate.cuda.arguments import numpy_dtype

HEADERS = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n#include <cuda_fp8.h>"
TYPES = {
    "float16": "half",
    "bfloat16": "nv_bfloat16",
    "float8_e4m3fn": "__nv_fp8_e4m3",
    "float8_e5m2": "__nv_fp8_e5m2",
}
# CUDA's fp8 conversions saturate to these; ml_dtypes overflows to infinity or NaN.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def convert(source: np.ndarray, target: str) -> np.ndarray:
    """Convert on the emulated device."""
    count = source.size
    names = {np.dtype(numpy_dtype(name)): name for name in (*TYPES, "float32")}
    cast = TYPES.get(target, "float")
    body = f"""
  int i = blockIdx.x * 128 + threadIdx.x;
  C[i] = ({cast})A[i];
"""
    buffers = [("A", (count,), names[source.dtype]), ("C", (count,), target)]
    img = image(body, buffers, grid=count // 128, block=128, preamble=HEADERS)
    return clean(img, source, orders=1)["C"]


def every(name: str) -> np.ndarray:
    """All bit patterns of a format."""
    dtype = numpy_dtype(name)
    bits = 8 * dtype.itemsize
    return np.arange(1 << bits, dtype=f"uint{bits}").view(dtype)


def same(got: np.ndarray, expected: np.ndarray) -> None:
    """Bitwise equal, except that every NaN is as good as another."""
    nan = np.isnan(expected.astype("float32"))
    np.testing.assert_array_equal(np.isnan(got.astype("float32")), nan)
    bits = f"uint{8 * got.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(bits)[~nan], expected.view(bits)[~nan])


def hard_floats(name: str) -> np.ndarray:
    """Every value of the format, what lies halfway and next to it, extremes, and random bits."""
    values = every(name).astype("float32")
    values = values[np.isfinite(values)]
    ordered = np.unique(values)
    halfway = (ordered[1:].astype("float64") + ordered[:-1]) / 2
    halfway = halfway.astype("float32")
    # Beyond the largest value, the point halfway to the next one that would exist.
    step = ordered[-1].astype("float64") - ordered[-2]
    beyond = np.array([ordered[-1] + step / 2, ordered[-1] + step], dtype="float64")
    edges = np.concatenate([halfway, np.minimum(beyond, 3.4e38).astype("float32")])
    up, down = np.float32(np.inf), np.float32(-np.inf)
    near = np.concatenate([edges, np.nextafter(edges, up), np.nextafter(edges, down)])
    special = np.array([0, np.inf, np.nan, 3.4e38, 1e-45, 1e-38, 1.2e-38], dtype="float32")
    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype="uint32").view("float32")
    floats = np.concatenate([values, near, special, -special, random])
    return np.concatenate([floats, np.zeros(-floats.size % 128, dtype="float32")])


@pytest.mark.parametrize("name", TYPES)
def test_every_pattern_to_float(name: str) -> None:
    same(convert(every(name), "float32"), every(name).astype("float32"))


@pytest.mark.parametrize("name", TYPES)
def test_hard_floats_round_to_nearest_even(name: str) -> None:
    floats = hard_floats(name)
    wanted = floats
    if name in LARGEST:
        wanted = np.clip(floats, -LARGEST[name], LARGEST[name])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = wanted.astype(numpy_dtype(name))
    same(convert(floats, name), expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_arithmetic_rounds_once(name: str) -> None:
    """Sum, difference, product and quotient of the format, each rounded from the exact value."""
    count = 1 << 14
    rng = np.random.default_rng(1)
    dtype = numpy_dtype(name)
    a, b = (rng.integers(0, 1 << 16, count, dtype="uint16").view(dtype) for _ in range(2))
    body = f"""
  int i = blockIdx.x * 128 + threadIdx.x;
  C[i] = A[i] + B[i];
  C[i + {count}] = A[i] - B[i];
  C[i + {2 * count}] = A[i] * B[i];
  C[i + {3 * count}] = A[i] / B[i];
"""
    buffers = [("A", (count,), name), ("B", (count,), name), ("C", (4, count), name)]
    img = image(body, buffers, grid=count // 128, block=128, preamble=HEADERS)
    got = clean(img, a, b, orders=1)["C"]
    with np.errstate(all="ignore"):
        x, y = a.astype("float64"), b.astype("float64")
        # float64 holds sums and products exactly; of quotients the rounded one is enough.
        exact = np.stack([x + y, x - y, x * y, x / y])
        same(got, exact.astype("float32").astype(dtype))


def test_vector_types_keep_lanes_and_alignment() -> None:
    body = """
  static_assert(alignof(float4) == 16 && alignof(half2) == 4 && sizeof(__nv_fp8x4_e4m3) == 4, "");
  float4 v = *(float4*)(A + threadIdx.x * 4);
  __nv_fp8x4_e4m3 packed = __nv_fp8x4_e4m3(v);
  float4 back = (float4)packed;
  half2 pair = __floats2half2_rn(back.x, back.w);
  float4 out = make_float4(__low2float(pair), back.y, back.z, __high2float(pair));
  *(float4*)(C + threadIdx.x * 4) = out;
"""
    a = np.arange(-64, 64, dtype="float32")
    expected = a.astype(ml_dtypes.float8_e4m3fn).astype("float32")
    img = image(
        body, [("A", (128,), "float32"), ("C", (128,), "float32")], block=32, preamble=HEADERS
    )
    np.testing.assert_array_equal(clean(img, a)["C"], expected)


def test_mixed_helpers() -> None:
    body = """
  half h = __float2half_rn(A[threadIdx.x]);
  nv_bfloat16 b = __float2bfloat16_rn(A[threadIdx.x]);
  float best = max(__half2float(__hmax(h, __float2half(0.5f))), __bfloat162float(b));
  float rest = fmaf(2.0f, 3.0f, (float)__hfma(h, h, h)) + max(3, (int)threadIdx.x);
  C[threadIdx.x] = min(best, 40.0f) + (float)(-h) + rest + (h > __float2half(8.0f) ? 1 : 0);
"""
    img = image(body, [("A", (64,), "float32"), ("C", (64,), "float32")], preamble=HEADERS)
    a = np.arange(64, dtype="float32")
    best = np.minimum(np.maximum(np.maximum(a, 0.5), a), 40)
    squares = (a * a + a).astype("float16").astype("float32")
    expected = best - a + 6 + squares + np.maximum(3, a) + (a > 8)
    np.testing.assert_array_equal(clean(img, a)["C"], expected)
