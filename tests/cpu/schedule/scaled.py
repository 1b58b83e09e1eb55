"""Products of few rows that a sum scales, as tests write them, and what separate kernels make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from tvm import tirx

from crossfuse.workload import parse
from crossfuse.workload.build import Form, Scaled, form_of
from crossfuse.workload.dtypes import Operand

EPSILON = 1e-5


def with_norm(text: str) -> Form:
    """The form of a product behind an RMS norm with gains."""
    form = form_of(parse(text))
    columns = form.left.shape[1]
    gain = Operand("gain", (columns,), form.left.dtype)

    def element(tensors: Any, i: Any, k: Any) -> Any:
        return tensors["A"](i, k).astype("float32") * tensors["gain"](k).astype("float32")

    def square(tensors: Any, i: Any, k: Any) -> Any:
        return tensors["A"](i, k).astype("float32") * tensors["A"](i, k).astype("float32")

    def scale(product: Any, total: Any) -> Any:
        mean = total * tirx.const(1 / columns, "float32")
        return tirx.rsqrt(mean + tirx.const(EPSILON, "float32")) * product

    scaled = Scaled(square, element, scale)
    return replace(form, scaled=scaled, extras=(*form.extras, gain))


def drawn(func: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of a function of bfloat16, standard normal."""
    rng = np.random.default_rng(seed)
    shapes = {str(each.name): tuple(map(int, each.ty.shape)) for each in func.params}
    return {
        name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
        if not name.startswith("out")
    }


def normed(rows: np.ndarray, gain: np.ndarray, *, wide: bool) -> np.ndarray:
    """An RMS norm in float64, or as separate kernels store it: rounded twice."""
    x = rows.astype(np.float64 if wide else np.float32)
    made = x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(EPSILON))
    if wide:
        return made * gain.astype(np.float64)
    made = made.astype(rows.dtype).astype(np.float32) * gain.astype(np.float32)
    return made.astype(rows.dtype).astype(np.float64)
