"""Functions of rows as people write them, beside what torch has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tvm import te, tirx, topi

#: Rows and columns, and a batch of them.
R, C = 5, 37
B = (2, 3, C)
EPSILON = 1e-5


@dataclass(frozen=True)
class Rows:
    """A function of rows X and others: shapes, what it is in TE, and in torch."""

    shapes: tuple[tuple[int, ...], ...]
    te: Callable[..., Any]
    torch: Callable[..., Any]

    def function(self) -> Any:
        """Its s_tir function."""
        names = "XYZW"
        given = [te.placeholder(s, "float64", names[at]) for at, s in enumerate(self.shapes)]
        made = self.te(*given)
        return te.create_prim_func([*given, *(made if isinstance(made, list) else [made])])


def f64(value: float) -> Any:
    return tirx.const(value, "float64")


def summed(shape: Any, element: Any, name: str, columns: int = C, by: Any = te.sum) -> Any:
    axis = te.reduce_axis((0, columns), "k")
    return te.compute(shape, lambda *at: by(element(*at, axis), axis=axis), name)


def exponentials(x: Any, value: Any = None) -> tuple[Any, Any, Any]:
    """An element of each row below the maximum, the maximum, and the sum of exponentials."""
    value = value or (lambda *at: x(*at))
    rows = x.shape[:-1]
    m = summed(rows, value, "m", by=te.max)
    s = summed(rows, lambda *at: tirx.exp(value(*at) - m(*at[:-1])), "s")
    return value, m, s


def softmax(x: Any, value: Any = None) -> Any:
    value, m, s = exponentials(x, value)
    return te.compute(x.shape, lambda *at: tirx.exp(value(*at) - m(*at[:-1])) / s(*at[:-1]), "y")


def logsumexp(x: Any) -> Any:
    _, m, s = exponentials(x)
    return te.compute(x.shape[:-1], lambda *at: m(*at) + tirx.log(s(*at)), "y")


def causal(x: Any) -> Any:
    return softmax(x, lambda i, j: tirx.Select(j <= i, x[i, j], f64(float("-inf"))))


def causal_in_torch(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(torch.ones(R, C).tril() == 0, -torch.inf).softmax(-1)


def labelled(x: Any) -> Any:
    """The mean loss of rows i whose label is 2*i, as one number."""
    _, m, s = exponentials(x)
    label = summed((R,), lambda i, j: tirx.Select(j == 2 * i, x[i, j], f64(0)), "label")
    losses = te.compute((R,), lambda i: m[i] + tirx.log(s[i]) - label[i], "losses")
    return topi.sum(losses) / float(R)


def labelled_in_torch(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, 2 * torch.arange(R))


def norm(
    x: Any, weight: Any = None, bias: Any = None, centred: bool = True, value: Any = None
) -> Any:
    value = value or (lambda *at: x(*at))
    rows = x.shape[:-1]
    mean = None
    if centred:
        total = summed(rows, lambda *at: x(*at), "total")
        mean = te.compute(rows, lambda *at: total(*at) / float(C), "mean")

    def away(*at: Any) -> Any:
        return x(*at) if mean is None else x(*at) - mean(*at[:-1])

    squares = summed(rows, lambda *at: away(*at) * away(*at), "squares")
    scale = te.compute(
        rows, lambda *at: tirx.rsqrt(squares(*at) / float(C) + f64(EPSILON)), "scale"
    )

    def element(*at: Any) -> Any:
        found = away(*at) * scale(*at[:-1])
        found = found if weight is None else found * weight[at[-1]]
        return found if bias is None else found + bias[at[-1]]

    return te.compute(x.shape, element, "y")


def with_residual(x: Any, residual: Any, weight: Any) -> Any:
    h = te.compute(x.shape, lambda i, j: x[i, j] + residual[i, j], "h")
    return [h, norm(h, weight, centred=False)]


def with_residual_in_torch(x: Any, residual: Any, weight: Any) -> Any:
    h = x + residual
    return h, F.rms_norm(h, (C,), weight, EPSILON)


def variance(x: Any) -> Any:
    total = summed((R,), lambda i, k: x[i, k], "total")
    mean = te.compute((R,), lambda i: total[i] / float(C), "mean")
    squares = summed((R,), lambda i, k: (x[i, k] - mean[i]) * (x[i, k] - mean[i]), "squares")
    return te.compute((R,), lambda i: squares[i] / float(C), "y")


def by_length(x: Any) -> Any:
    squares = summed((R,), lambda i, k: x[i, k] * x[i, k], "squares")
    return te.compute((R, C), lambda i, j: x[i, j] / tirx.sqrt(squares[i] + f64(EPSILON)), "y")


def by_length_in_torch(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt()


def pooled(x: Any, v: Any) -> Any:
    y = softmax(x)
    return summed((R,), lambda i, k: y[i, k] * v[i, k], "pooled")


def entropy(x: Any) -> Any:
    """Of a softmax: the logarithm of the sum less the mean of what is below the maximum."""
    value, m, s = exponentials(x)
    mean = summed((R,), lambda i, j: tirx.exp(value(i, j) - m[i]) * (value(i, j) - m[i]), "mean")
    return te.compute((R,), lambda i: tirx.log(s[i]) - mean[i] / s[i], "y")


def entropy_in_torch(x: torch.Tensor) -> torch.Tensor:
    return -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)


def group_norm(x: Any) -> Any:
    """Of (batch, groups, channels, pixels), over the last two."""
    shape = x.shape
    rows, size = shape[:2], float(int(shape[2]) * int(shape[3]))

    def both(element: Any, name: str) -> Any:
        c, p = te.reduce_axis((0, shape[2]), "c"), te.reduce_axis((0, shape[3]), "p")
        return te.compute(rows, lambda n, g: te.sum(element(n, g, c, p), axis=[c, p]), name)

    total = both(lambda *at: x(*at), "total")
    mean = te.compute(rows, lambda n, g: total[n, g] / size, "mean")

    def away(n: Any, g: Any, c: Any, p: Any) -> Any:
        return x[n, g, c, p] - mean[n, g]

    squares = both(lambda *at: away(*at) * away(*at), "squares")

    def element(n: Any, g: Any, c: Any, p: Any) -> Any:
        return away(n, g, c, p) * tirx.rsqrt(squares[n, g] / size + f64(EPSILON))

    return te.compute(shape, element, "y")


def group_norm_in_torch(x: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x.flatten(1, 2), x.shape[1], eps=EPSILON).reshape(x.shape)


X, ROW = (R, C), (C,)
ROWS = {
    "softmax": Rows((X,), topi.nn.softmax, lambda x: x.softmax(-1)),
    "softmax of a batch": Rows((B,), softmax, lambda x: x.softmax(-1)),
    "softmax of columns": Rows((X,), lambda x: topi.nn.softmax(x, axis=0), lambda x: x.softmax(0)),
    "softmax, scaled and masked": Rows(
        (X, X),
        lambda x, y: softmax(x, lambda i, j: x[i, j] * f64(0.125) + y[i, j]),
        lambda x, y: (x * 0.125 + y).softmax(-1),
    ),
    "causal softmax": Rows((X,), causal, causal_in_torch),
    "log softmax": Rows((X,), topi.nn.log_softmax, lambda x: x.log_softmax(-1)),
    "logsumexp": Rows((X,), logsumexp, lambda x: x.logsumexp(-1)),
    "cross entropy, mean of rows": Rows((X,), labelled, labelled_in_torch),
    "entropy": Rows((X,), entropy, entropy_in_torch),
    "weighted by a softmax": Rows((X, X), pooled, lambda x, v: (x.softmax(-1) * v).sum(-1)),
    "layer norm": Rows((X,), norm, lambda x: F.layer_norm(x, (C,), eps=EPSILON)),
    "layer norm of a batch, with gain and bias": Rows(
        (B, ROW, ROW), norm, lambda x, w, b: F.layer_norm(x, (C,), w, b, EPSILON)
    ),
    "RMS norm": Rows(
        (X,), lambda x: norm(x, centred=False), lambda x: F.rms_norm(x, (C,), eps=EPSILON)
    ),
    "RMS norm of a batch, with gain": Rows(
        (B, ROW),
        lambda x, w: norm(x, w, centred=False),
        lambda x, w: F.rms_norm(x, (C,), w, EPSILON),
    ),
    "RMS norm of a sum": Rows((X, X, ROW), with_residual, with_residual_in_torch),
    "group norm": Rows(((2, 3, 4, 9),), group_norm, group_norm_in_torch),
    "variance": Rows((X,), variance, lambda x: x.var(-1, correction=0)),
    "divided by its length": Rows((X,), by_length, by_length_in_torch),
}
