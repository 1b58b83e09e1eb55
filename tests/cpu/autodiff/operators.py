"""Operators in TE beside what torch has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tvm import te, tirx, topi


@dataclass(frozen=True)
class Operator:
    """An operator: shapes of its inputs, what it is in TE, in torch, and what its inputs are."""

    shapes: tuple[tuple[int, ...], ...]
    te: Callable[..., Any]
    torch: Callable[..., torch.Tensor]
    #: Makes an input of random numbers; None leaves them as they are.
    inputs: Callable[[torch.Tensor], torch.Tensor] | None = None

    def function(self) -> Any:
        """Its s_tir function."""
        names = "XYZUVW"
        given = [te.placeholder(s, "float64", names[at]) for at, s in enumerate(self.shapes)]
        return te.create_prim_func([*given, self.te(*given)])


def positive(x: torch.Tensor) -> torch.Tensor:
    return x.abs() + 0.1


def inside(x: torch.Tensor) -> torch.Tensor:
    """Between -1 and 1."""
    return torch.tanh(x) * 0.9


def above(x: torch.Tensor) -> torch.Tensor:
    """Larger than 1."""
    return x.abs() + 1.1


def whole(x: torch.Tensor) -> torch.Tensor:
    """Few numbers, so that many are equal."""
    return torch.round(x)


def sparse(x: torch.Tensor) -> torch.Tensor:
    """Rows with no, one, and more zeros."""
    x = x.clone().reshape(-1, x.shape[-1])
    x[1, 2] = x[2, 0] = x[2, 3] = 0
    return x


V = (4, 6)


def unary(made: Any, other: Any, inputs: Any = None) -> Operator:
    return Operator((V,), lambda x: te.compute(V, lambda i, j: made(x[i, j])), other, inputs)


def pair(made: Any, other: Any, inputs: Any = None) -> Operator:
    return Operator(
        (V, V), lambda x, y: te.compute(V, lambda i, j: made(x[i, j], y[i, j])), other, inputs
    )


def f64(value: float) -> Any:
    return tirx.const(value, "float64")


def gelu(x: Any) -> Any:
    return x * 0.5 * (1.0 + tirx.erf(x * f64(0.5**0.5)))


def softplus(x: Any) -> Any:
    return tirx.max(x, f64(0)) + tirx.log(1.0 + tirx.exp(f64(0) - tirx.abs(x)))


FUNCTIONS = {
    "exp": unary(tirx.exp, torch.exp),
    "exp2": unary(tirx.exp2, torch.exp2),
    "exp10": unary(tirx.exp10, lambda x: torch.pow(10.0, x)),
    "log": unary(tirx.log, torch.log, positive),
    "log2": unary(tirx.log2, torch.log2, positive),
    "log10": unary(tirx.log10, torch.log10, positive),
    "log1p": unary(tirx.log1p, torch.log1p, positive),
    "sqrt": unary(tirx.sqrt, torch.sqrt, positive),
    "rsqrt": unary(tirx.rsqrt, torch.rsqrt, positive),
    "tanh": unary(tirx.tanh, torch.tanh),
    "sigmoid": unary(tirx.sigmoid, torch.sigmoid),
    "erf": unary(tirx.erf, torch.erf),
    "sin": unary(tirx.sin, torch.sin),
    "cos": unary(tirx.cos, torch.cos),
    "tan": unary(tirx.tan, torch.tan, inside),
    "asin": unary(tirx.asin, torch.asin, inside),
    "acos": unary(tirx.acos, torch.acos, inside),
    "atan": unary(tirx.atan, torch.atan),
    "sinh": unary(tirx.sinh, torch.sinh),
    "cosh": unary(tirx.cosh, torch.cosh),
    "asinh": unary(tirx.asinh, torch.asinh),
    "acosh": unary(tirx.acosh, torch.acosh, above),
    "atanh": unary(tirx.atanh, torch.atanh, inside),
    "abs": unary(tirx.abs, torch.abs, whole),
    "floor": unary(lambda x: x * tirx.floor(x), lambda x: x * torch.floor(x)),
    "ceil": unary(lambda x: x * tirx.ceil(x), lambda x: x * torch.ceil(x)),
    "trunc": unary(lambda x: x * tirx.trunc(x), lambda x: x * torch.trunc(x)),
    "round": unary(lambda x: x + tirx.round(x), lambda x: x + torch.round(x)),
    "through integers": unary(
        lambda x: x * x.astype("int32").astype("float64"), lambda x: x * torch.trunc(x)
    ),
    "square": unary(lambda x: tirx.pow(x, f64(2)), torch.square, whole),
    "cube": unary(lambda x: tirx.pow(x, f64(3)), lambda x: x**3, whole),
    "to the power 1": unary(lambda x: tirx.pow(x, f64(1)), lambda x: x**1.0, whole),
    "to the power 0": unary(lambda x: x + tirx.pow(x, f64(0)), lambda x: x + x**0.0, whole),
    "to the power 1.5": unary(lambda x: tirx.pow(x, f64(1.5)), lambda x: x**1.5, positive),
    "of a constant": unary(lambda x: tirx.pow(f64(3), x), lambda x: 3.0**x),
    "reciprocal": unary(lambda x: 1.0 / x, torch.reciprocal, positive),
    "clip": unary(lambda x: tirx.max(tirx.min(x, f64(0.5)), f64(-1)), lambda x: x.clamp(-1, 0.5)),
    "relu": unary(lambda x: tirx.max(x, f64(0)), torch.relu),
    "leaky relu": unary(
        lambda x: tirx.Select(x > 0.0, x, x * 0.01), lambda x: F.leaky_relu(x), whole
    ),
    "elu": unary(lambda x: tirx.Select(x > 0.0, x, tirx.exp(x) - 1.0), F.elu),
    "gelu": unary(gelu, F.gelu),
    "gelu by tanh": unary(
        lambda x: (
            0.5 * x * (1.0 + tirx.tanh(f64((2 / torch.pi) ** 0.5) * (x + 0.044715 * x * x * x)))
        ),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "silu": unary(lambda x: x * tirx.sigmoid(x), F.silu),
    "mish": unary(lambda x: x * tirx.tanh(softplus(x)), F.mish),
    "softplus": unary(softplus, F.softplus),
    "softsign": unary(lambda x: x / (1.0 + tirx.abs(x)), F.softsign),
    "hard swish": unary(
        lambda x: x * tirx.max(tirx.min(x + 3.0, f64(6)), f64(0)) / 6.0, F.hardswish
    ),
    "choice of a logarithm": unary(
        lambda x: tirx.if_then_else(x > 0.0, tirx.log(x), x),
        lambda x: torch.where(x > 0, torch.log(x.clamp(min=1e-9)), x),
        lambda x: x + 1e-3,
    ),
    "sum": pair(lambda x, y: x + y, torch.add),
    "difference": pair(lambda x, y: x - y, torch.sub),
    "product": pair(lambda x, y: x * y, torch.mul),
    "quotient": pair(lambda x, y: x / y, torch.div, positive),
    "maximum with ties": pair(tirx.max, torch.maximum, whole),
    "minimum with ties": pair(tirx.min, torch.minimum, whole),
    "power": pair(tirx.pow, torch.pow, positive),
    "remainder": pair(lambda x, y: tirx.FloorMod(x, y), torch.remainder, positive),
    "fmod": pair(tirx.fmod, torch.fmod, positive),
    "atan2": pair(tirx.atan2, torch.atan2),
    "hypot": pair(tirx.hypot, torch.hypot),
    "gated": pair(lambda x, y: x * tirx.sigmoid(x) * y, lambda x, y: F.silu(x) * y),
    "where": pair(
        lambda x, y: tirx.Select(x > y, x * y, y), lambda x, y: torch.where(x > y, x * y, y)
    ),
}


def reduction(made: Any, other: Any, inputs: Any = None, shape: tuple[int, ...] = V) -> Operator:
    return Operator((shape,), made, other, inputs)


def variance(x: Any) -> Any:
    mean = topi.sum(x, 1, keepdims=True) / 6.0
    apart = x - mean
    return topi.sum(apart * apart, 1) / 6.0


def normed(x: Any, gain: Any, bias: Any) -> Any:
    mean = topi.sum(x, 1, keepdims=True) / 6.0
    apart = x - mean
    spread = topi.sum(apart * apart, 1, keepdims=True) / 6.0
    return apart * topi.rsqrt(spread + f64(1e-5)) * gain + bias


def prod_in_python(x: Any) -> Any:
    return topi.prod(x, 1)


def distances(x: Any, y: Any) -> Any:
    k = te.reduce_axis((0, 6), "k")
    return te.compute(
        (4, 4), lambda i, j: te.sum((x[i, k] - y[j, k]) * (x[i, k] - y[j, k]), axis=k)
    )


REDUCTIONS = {
    "sum of rows": reduction(lambda x: topi.sum(x, 1), lambda x: x.sum(1)),
    "sum of columns": reduction(lambda x: topi.sum(x, 0), lambda x: x.sum(0)),
    "sum of all": reduction(topi.sum, torch.sum),
    "mean": reduction(lambda x: topi.sum(x, 1, keepdims=True) / 6.0, lambda x: x.mean(1, True)),
    "product of rows": reduction(prod_in_python, lambda x: x.prod(1)),
    "product of rows with zeros": reduction(prod_in_python, lambda x: x.prod(1), sparse),
    "product of sums": reduction(
        lambda x: topi.prod(x + x * x, 1), lambda x: (x + x * x).prod(1), sparse
    ),
    "maximum of rows": reduction(lambda x: topi.max(x, 1), lambda x: x.amax(1)),
    "maximum with equal ones": reduction(lambda x: topi.max(x, 1), lambda x: x.amax(1), whole),
    "minimum with equal ones": reduction(lambda x: topi.min(x, 1), lambda x: x.amin(1), whole),
    "largest magnitude": reduction(
        lambda x: topi.max(topi.abs(x), 1), lambda x: x.abs().amax(1), whole
    ),
    "maximum of an expression": Operator(
        (V,),
        lambda x: te.compute(
            (4,),
            (lambda k: lambda i: te.max(x[i, k] * x[i, k] + 1.0, axis=k))(te.reduce_axis((0, 6))),
        ),
        lambda x: (x * x + 1).amax(1),
        whole,
    ),
    "variance": reduction(variance, lambda x: x.var(1, correction=0)),
    "norm": reduction(lambda x: topi.sqrt(topi.sum(x * x, 1)), lambda x: x.norm(dim=1)),
    "log of summed exponentials": reduction(
        lambda x: topi.log(topi.sum(topi.exp(x), 1)), lambda x: torch.logsumexp(x, 1)
    ),
    "softmax": reduction(topi.nn.softmax, lambda x: torch.softmax(x, 1)),
    "softmax of equal ones": reduction(topi.nn.softmax, lambda x: torch.softmax(x, 1), whole),
    "softmax of columns": reduction(
        lambda x: topi.nn.softmax(x, axis=0), lambda x: torch.softmax(x, 0)
    ),
    "log softmax": reduction(topi.nn.log_softmax, lambda x: torch.log_softmax(x, 1)),
    "layer norm": Operator((V, (6,), (6,)), normed, lambda x, g, b: F.layer_norm(x, (6,), g, b)),
    "RMS norm": Operator(
        (V, (6,)),
        lambda x, g: x * topi.rsqrt(topi.sum(x * x, 1, keepdims=True) / 6.0 + f64(1e-6)) * g,
        lambda x, g: F.rms_norm(x, (6,), g, 1e-6),
    ),
    "cumulative sum": Operator(
        (V,),
        lambda x: te.compute(
            V,
            (lambda k: lambda i, j: te.sum(tirx.if_then_else(k <= j, x[i, k], f64(0)), axis=k))(
                te.reduce_axis((0, 6))
            ),
        ),
        lambda x: x.cumsum(1),
    ),
    "cross entropy": Operator(
        (V, V),
        lambda x, y: topi.sum(f64(0) - topi.nn.log_softmax(x) * y),
        lambda x, y: -(torch.log_softmax(x, 1) * y).sum(),
    ),
    "squared error": Operator(
        (V, V), lambda x, y: topi.sum((x - y) * (x - y)), lambda x, y: ((x - y) ** 2).sum()
    ),
    "distances": Operator((V, (4, 6)), distances, lambda x, y: torch.cdist(x, y) ** 2),
}


def attention(q: Any, k: Any, v: Any) -> Any:
    d = te.reduce_axis((0, 3), "d")
    scores = te.compute((2, 5, 5), lambda b, i, j: te.sum(q[b, i, d] * k[b, j, d], axis=d))
    masked = te.compute(
        (2, 5, 5), lambda b, i, j: tirx.if_then_else(j <= i, scores[b, i, j], f64(-1e30))
    )
    return topi.nn.batch_matmul(topi.nn.softmax(masked), v, transpose_b=False)


def shared_heads(q: Any, k: Any) -> Any:
    """Queries of four heads and keys of two."""
    d = te.reduce_axis((0, 3), "d")
    return te.compute((4, 5, 6), lambda h, i, j: te.sum(q[h, i, d] * k[h // 2, j, d], axis=d))


def gram(x: Any) -> Any:
    k = te.reduce_axis((0, 6), "k")
    return te.compute((4, 4), lambda i, j: te.sum(x[i, k] * x[j, k], axis=k))


def trilinear(x: Any, y: Any, z: Any) -> Any:
    a, b = te.reduce_axis((0, 3), "a"), te.reduce_axis((0, 4), "b")
    return te.compute((2, 5), lambda i, o: te.sum(x[i, a] * z[o, a, b] * y[i, b], axis=[a, b]))


PRODUCTS = {
    "product of matrices": Operator(((4, 6), (6, 5)), topi.matmul, torch.matmul),
    "by a transposed weight": Operator(((4, 6), (5, 6)), topi.nn.dense, F.linear),
    "dense with bias": Operator(((4, 6), (5, 6), (5,)), topi.nn.dense, F.linear),
    "batch of products": Operator(
        ((2, 4, 6), (2, 5, 6)), topi.nn.batch_matmul, lambda x, y: x @ y.mT
    ),
    "one weight for a batch": Operator(
        ((3, 4, 6), (1, 5, 6)), topi.nn.batch_matmul, lambda x, y: x @ y.mT
    ),
    "outer product": Operator(
        ((4,), (5,)), lambda x, y: te.compute((4, 5), lambda i, j: x[i] * y[j]), torch.outer
    ),
    "inner product": Operator(((7,), (7,)), lambda x, y: topi.sum(x * y), torch.dot),
    "Gram matrix": Operator(((4, 6),), gram, lambda x: x @ x.T),
    "trilinear": Operator(
        ((2, 3), (2, 4), (5, 3, 4)), trilinear, lambda x, y, z: F.bilinear(x, y, z)
    ),
    "causal attention": Operator(
        ((2, 5, 3), (2, 5, 3), (2, 5, 3)),
        attention,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0),
    ),
    "heads that share keys": Operator(
        ((4, 5, 3), (2, 6, 3)),
        shared_heads,
        lambda q, k: q @ k.repeat_interleave(2, 0).mT,
    ),
}

IMAGE = (2, 4, 7, 6)


def upsampled(x: Any) -> Any:
    return te.compute((2, 4, 14, 18), lambda n, c, i, j: x[n, c, i // 2, j // 3])


def reflected(x: Any) -> Any:
    return topi.nn.mirror_pad(x, [0, 0, 2, 1], [0, 0, 1, 2], "REFLECT")


def clamped(x: Any) -> Any:
    """Edges repeated: 2 above, 1 below, 1 at each side."""
    return te.compute(
        (2, 4, 10, 8),
        lambda n, c, i, j: x[
            n, c, tirx.min(tirx.max(i - 2, 0), 6), tirx.min(tirx.max(j - 1, 0), 5)
        ],
    )


def unfolded(x: Any) -> Any:
    """Windows of 3 x 3 as columns, all divided from two flat indices."""
    return te.compute(
        (2, 36, 20),
        lambda n, q, p: x[n, q // 9, p // 4 + q // 3 % 3, p % 4 + q % 3],
    )


def unshuffled(x: Any) -> Any:
    return te.compute(
        (2, 16, 3, 3),
        lambda n, c, i, j: x[n, c // 4, 2 * i + c // 2 % 2, 2 * j + c % 2],
    )


def grouped(x: Any, gain: Any, bias: Any) -> Any:
    """Norm of two groups of channels, whose statistics are read at ``c // 2``."""
    c, i, j = (te.reduce_axis((0, each)) for each in (2, 7, 6))
    mean = te.compute((2, 2), lambda n, g: te.sum(x[n, g * 2 + c, i, j] / 84.0, axis=[c, i, j]))
    apart = te.compute(IMAGE, lambda n, c, i, j: x[n, c, i, j] - mean[n, c // 2])
    c, i, j = (te.reduce_axis((0, each)) for each in (2, 7, 6))
    square = te.compute(
        (2, 2),
        lambda n, g: te.sum(
            apart[n, g * 2 + c, i, j] * apart[n, g * 2 + c, i, j] / 84.0, axis=[c, i, j]
        ),
    )
    return te.compute(
        IMAGE,
        lambda n, c, i, j: (
            apart[n, c, i, j] * tirx.rsqrt(square[n, c // 2] + f64(1e-5)) * gain[c] + bias[c]
        ),
    )


def conv(stride: int, padding: int, dilation: int) -> Operator:
    return Operator(
        (IMAGE, (3, 4, 3, 3)),
        lambda x, w: topi.nn.conv2d_nchw(x, w, stride, padding, dilation),
        lambda x, w: F.conv2d(x, w, stride=stride, padding=padding, dilation=dilation),
    )


def pool(kind: str, k: int, stride: int, pad: int, other: Any, count: bool = True) -> Operator:
    made = lambda x: topi.nn.pool2d(  # noqa: E731
        x, (k, k), (stride, stride), (1, 1), (pad,) * 4, kind, count_include_pad=count
    )
    return Operator((IMAGE,), made, lambda x: other(x, k, stride, pad))


IMAGES = {
    "convolution": conv(1, 0, 1),
    "padded convolution": conv(1, 1, 1),
    "strided convolution": conv(2, 1, 1),
    "dilated convolution": conv(1, 2, 2),
    "strided and dilated convolution": conv(2, 2, 2),
    "convolution by threes": conv(3, 2, 2),
    "convolution of lines": Operator(
        ((2, 4, 9), (3, 4, 3)),
        lambda x, w: topi.nn.conv1d_ncw(x, w, 2, 1, 1),
        lambda x, w: F.conv1d(x, w, stride=2, padding=1),
    ),
    "convolution of volumes": Operator(
        ((1, 2, 4, 4, 4), (2, 2, 2, 2, 2)),
        lambda x, w: topi.nn.conv3d_ncdhw(x, w, 1, 0, 1, 1),
        lambda x, w: F.conv3d(x, w),
    ),
    "convolution by channels": Operator(
        (IMAGE, (4, 1, 3, 3)),
        lambda x, w: topi.nn.depthwise_conv2d_nchw(x, w, 1, 1, 1),
        lambda x, w: F.conv2d(x, w, padding=1, groups=4),
    ),
    "grouped convolution": Operator(
        (IMAGE, (6, 2, 3, 3)),
        lambda x, w: topi.nn.group_conv2d_nchw(x, w, 1, 1, 1, 2),
        lambda x, w: F.conv2d(x, w, padding=1, groups=2),
    ),
    "transposed convolution": Operator(
        ((1, 3, 4, 4), (3, 2, 3, 3)),
        lambda x, w: topi.nn.conv2d_transpose_nchw(x, w, (2, 2), (1, 1), "float64", (0, 0)),
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
    ),
    "mean pooling": pool("avg", 2, 2, 0, F.avg_pool2d),
    "padded mean pooling": pool("avg", 3, 2, 1, F.avg_pool2d),
    "mean of what is inside": pool(
        "avg",
        3,
        2,
        1,
        lambda x, *a: F.avg_pool2d(x, *a, count_include_pad=False),
        count=False,
    ),
    "largest of windows": pool("max", 3, 2, 1, F.max_pool2d),
    "mean of images": Operator(
        (IMAGE,), lambda x: topi.sum(x, (2, 3)) / 42.0, lambda x: x.mean((2, 3))
    ),
    "nearest pixels": Operator((IMAGE,), upsampled, lambda x: F.interpolate(x, size=(14, 18))),
    "windows as columns": Operator((IMAGE,), unfolded, lambda x: F.unfold(x, 3)),
    "depth to space": Operator(
        (IMAGE,),
        lambda x: topi.nn.depth_to_space(x, 2, mode="CRD"),
        lambda x: F.pixel_shuffle(x, 2),
    ),
    "space to depth": Operator(((2, 4, 6, 6),), unshuffled, lambda x: F.pixel_unshuffle(x, 2)),
    "padding": Operator(
        (IMAGE,),
        lambda x: topi.nn.pad(x, (0, 0, 1, 2), (0, 0, 3, 1), f64(2)),
        lambda x: F.pad(x, (2, 1, 1, 3), value=2.0),
    ),
    "reflected edges": Operator(
        (IMAGE,), reflected, lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect")
    ),
    "repeated edges": Operator(
        (IMAGE,), clamped, lambda x: F.pad(x, (1, 1, 2, 1), mode="replicate")
    ),
    "group norm": Operator(
        (IMAGE, (4,), (4,)),
        grouped,
        lambda x, g, b: F.group_norm(x, 2, g, b, 1e-5),
    ),
}

LAYOUTS = {
    "transpose": Operator((V,), topi.transpose, lambda x: x.T),
    "permutation": Operator(
        ((2, 3, 4),), lambda x: topi.transpose(x, (2, 0, 1)), lambda x: x.permute(2, 0, 1)
    ),
    "reshape": Operator((V,), lambda x: topi.reshape(x, (3, 8)), lambda x: x.reshape(3, 8)),
    "flat": Operator(((2, 3, 4),), topi.nn.flatten, lambda x: x.flatten(1)),
    "reshape across": Operator(
        ((2, 3, 4),), lambda x: topi.reshape(x, (4, 6)), lambda x: x.reshape(4, 6)
    ),
    "new axis": Operator((V,), lambda x: topi.expand_dims(x, 1), lambda x: x[:, None]),
    "no axis": Operator(((4, 1, 6),), lambda x: topi.squeeze(x, 1), lambda x: x[:, 0]),
    "broadcast": Operator(
        ((4, 1),), lambda x: topi.broadcast_to(x, (3, 4, 5)), lambda x: x.broadcast_to(3, 4, 5)
    ),
    "sum with a row": Operator((V, (6,)), topi.add, torch.add),
    "product with a column": Operator((V, (4, 1)), topi.multiply, torch.mul),
    "product with a number": Operator(
        (V, ()), lambda x, y: te.compute(V, lambda i, j: x[i, j] * y()), torch.mul
    ),
    "concatenation": Operator(
        ((4, 2), (4, 3), (4, 1)),
        lambda *each: topi.concatenate(each, 1),
        lambda *each: torch.cat(each, 1),
    ),
    "twice beside itself": Operator(
        (V,), lambda x: topi.concatenate([x, x * x], 0), lambda x: torch.cat([x, x * x])
    ),
    "stack": Operator(
        (V, V), lambda *each: topi.stack(each, 1), lambda *each: torch.stack(each, 1)
    ),
    "slice": Operator(
        ((9, 8),),
        lambda x: topi.strided_slice(x, [1, 0], [8, 8], [3, 2]),
        lambda x: x[1:8:3, 0:8:2],
    ),
    "flip": Operator((V,), lambda x: topi.flip(x, 1), lambda x: x.flip(1)),
    "roll": Operator(
        (V,), lambda x: te.compute(V, lambda i, j: x[i, (j + 4) % 6]), lambda x: x.roll(2, 1)
    ),
    "tile": Operator((V,), lambda x: topi.tile(x, (2, 3)), lambda x: x.tile(2, 3)),
    "repeat": Operator((V,), lambda x: topi.repeat(x, 3, 1), lambda x: x.repeat_interleave(3, 1)),
    "diagonal": Operator(((5, 5),), lambda x: te.compute((5,), lambda i: x[i, i]), torch.diagonal),
    "trace": Operator(
        ((5, 5),),
        lambda x: te.compute(
            (), (lambda k: lambda: te.sum(x[k, k], axis=k))(te.reduce_axis((0, 5)))
        ),
        torch.trace,
    ),
    "lower triangle": Operator(
        ((5, 5),),
        lambda x: te.compute((5, 5), lambda i, j: tirx.Select(j <= i, x[i, j], f64(0))),
        torch.tril,
    ),
    "differences": Operator(
        (V,), lambda x: te.compute((4, 5), lambda i, j: x[i, j + 1] - x[i, j]), lambda x: x.diff()
    ),
    "second differences": Operator(
        (V,),
        lambda x: te.compute((4, 4), lambda i, j: x[i, j] - 2.0 * x[i, j + 1] + x[i, j + 2]),
        lambda x: x.diff(n=2),
    ),
    "rotated pairs": Operator(
        (V, (6,)),
        lambda x, y: te.compute(
            V,
            lambda i, j: (
                x[i, j] * tirx.cos(y[j])
                + tirx.if_then_else(j < 3, f64(0) - x[i, (j + 3) % 6], x[i, (j + 3) % 6])
                * tirx.sin(y[j])
            ),
        ),
        lambda x, y: x * y.cos() + torch.cat([-x[:, 3:], x[:, :3]], 1) * y.sin(),
    ),
    "relative positions": Operator(
        ((9,),),
        lambda x: te.compute((5, 5), lambda i, j: x[i - j + 4]),
        lambda x: x[torch.arange(5)[:, None] - torch.arange(5) + 4],
    ),
    "distances of positions": Operator(
        ((5,),),
        lambda x: te.compute((5, 5), lambda i, j: x[tirx.abs(i - j)]),
        lambda x: x[(torch.arange(5)[:, None] - torch.arange(5)).abs()],
    ),
}

OPERATORS = {**FUNCTIONS, **REDUCTIONS, **PRODUCTS, **IMAGES, **LAYOUTS}
