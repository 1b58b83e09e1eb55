"""Functions of rows as models have them: norms of norms, losses, statistics, gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional


@dataclass(frozen=True)
class Rows:
    """What functions are of: rows, weights, masks, and one number or place for each row."""

    #: Elements, two tensors of them.
    x: Any
    y: Any
    #: Positive, and of either sign.
    w: Any
    v: Any
    #: One for each row, positive.
    t: Any
    #: Whether elements count.
    seen: Any
    #: A place in each row.
    at: Any


Function = Callable[[Rows], Any]


def total(x: Any) -> Any:
    return x.sum(-1, keepdim=True)


def mean(x: Any) -> Any:
    return x.mean(-1, keepdim=True)


def largest(x: Any) -> Any:
    return x.amax(-1, keepdim=True)


def least(x: Any) -> Any:
    return x.amin(-1, keepdim=True)


def scores(x: Any, eps: float = 1e-5) -> Any:
    """Standard scores: a layer norm."""
    apart = x - mean(x)
    return apart * torch.rsqrt(mean(apart.square()) + eps)


def entropy(x: Any) -> Any:
    logs = x.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def divergence(x: Any, y: Any) -> Any:
    return (x.softmax(-1) * (x.log_softmax(-1) - y.log_softmax(-1))).sum(-1)


def picked(x: Any, at: Any) -> Any:
    """The logarithm of the probability of one element of each row."""
    return x.log_softmax(-1).gather(-1, at[:, None])[:, 0]


def focal(r: Rows) -> Any:
    logs = picked(r.x, r.at)
    return -((1 - logs.exp()) ** 2) * logs


def preference(r: Rows) -> Any:
    """The loss of direct preference optimisation."""
    return -F.logsigmoid(0.1 * (picked(r.x, r.at) - picked(r.y, r.at)))


def covariance(r: Rows) -> Any:
    return ((r.x - mean(r.x)) * (r.y - mean(r.y))).mean(-1)


def correlation(r: Rows) -> Any:
    x, y = r.x - mean(r.x), r.y - mean(r.y)
    return (x * y).sum(-1) / (x.square().sum(-1).sqrt() * y.square().sum(-1).sqrt())


def weighted_norm(r: Rows) -> Any:
    apart = r.x - total(r.w * r.x) / total(r.w)
    return apart * torch.rsqrt(total(r.w * apart.square()) / total(r.w) + 1e-5)


def variance_of_softmax(r: Rows) -> Any:
    weights = r.x.softmax(-1)
    return (weights * (r.v - total(weights * r.v)).square()).sum(-1)


def gradient_of_variance(r: Rows) -> Any:
    """Of the variance of x by its own softmax: what rounding leaves of the mean cancels."""
    weights = r.x.softmax(-1)
    apart = r.x - total(weights * r.x)
    first = 2 * r.t * weights * apart
    inner = r.t * apart.square() - total(first) * r.x
    return first - total(first) * weights + weights * (inner - total(weights * inner))


def gradient_of_softmax(r: Rows) -> Any:
    weights = r.x.softmax(-1)
    return weights * (r.v - total(weights * r.v))


def gradient_of_norm(r: Rows) -> Any:
    by = torch.rsqrt(mean((r.x - mean(r.x)).square()) + 1e-5)
    normal = scores(r.x)
    return by * (r.v - mean(r.v) - normal * mean(normal * r.v))


def root_mean_square(x: Any) -> Any:
    return x * torch.rsqrt(mean(x.square()) + 1e-6)


#: Those that had faults once, or have several references.
QUICK: dict[str, Function] = {
    "distances from the mean by the range": lambda r: (
        (r.x - mean(r.x)) / (largest(r.x) - least(r.x) + 1e-6)
    ),
    "layer norm of a layer norm": lambda r: scores(scores(r.x)),
    "softmax by a mask that is a number": lambda r: (
        r.x + (1 - r.seen.to(r.x.dtype)) * -1e9
    ).softmax(-1),
    "softmax by a temperature": lambda r: (
        r.x / ((r.t / torch.sqrt(r.t + 1e-5)).abs() + 0.1)
    ).softmax(-1),
    "preference": preference,
    "divergence": lambda r: divergence(r.x, r.y),
    "kurtosis": lambda r: (scores(r.x, 0) ** 4).mean(-1) - 3,
    "norm by weights": weighted_norm,
    "gradient of a variance": gradient_of_variance,
}
#: Others.
MORE: dict[str, Function] = {
    "softmax of a layer norm": lambda r: scores(r.x).softmax(-1),
    "layer norm of a softmax": lambda r: scores(r.x.softmax(-1)),
    "softmax of a softmax": lambda r: r.x.softmax(-1).softmax(-1),
    "root mean square of a softmax": lambda r: root_mean_square(r.x.softmax(-1)),
    "entropy": lambda r: entropy(r.x),
    "entropy and a penalty": lambda r: r.x.logsumexp(-1).square() * 1e-4 + entropy(r.x),
    "skewness": lambda r: (scores(r.x, 0) ** 3).mean(-1),
    "fifth moment": lambda r: (scores(r.x) ** 5).mean(-1),
    "logarithms of sums of exponentials": lambda r: r.x.logsumexp(-1) - 2 * (r.x / 2).logsumexp(-1),
    "both ends": lambda r: r.x.logsumexp(-1) + (-r.x).logsumexp(-1),
    "weights in exponents": lambda r: (r.x + r.w.log()).logsumexp(-1),
    "Gini": lambda r: 1 - r.x.softmax(-1).square().sum(-1),
    "Tsallis": lambda r: (1 - (r.x.softmax(-1) ** 3).sum(-1)) / 2,
    "mean below a softmax": lambda r: r.x - total(r.x.softmax(-1) * r.x),
    "middle": lambda r: (
        (r.x - (largest(r.x) + least(r.x)) / 2) / ((largest(r.x) - least(r.x)) / 2 + 1e-6)
    ),
    "products of two ends": lambda r: ((r.x - largest(r.x)) * (r.x - least(r.x))).mean(-1),
    "largest as a score": lambda r: (
        (r.x.amax(-1) - r.x.mean(-1)) / ((r.x - mean(r.x)).square().mean(-1) + 1e-5).sqrt()
    ),
    "cross entropy of two": lambda r: -(r.y.softmax(-1) * r.x.log_softmax(-1)).sum(-1),
    "smoothed cross entropy": lambda r: (
        -(0.1 * r.x.log_softmax(-1).mean(-1) + 0.9 * picked(r.x, r.at))
    ),
    "focal": focal,
    "contrast": lambda r: r.x.logsumexp(-1) - r.x.masked_fill(~r.seen, -torch.inf).logsumexp(-1),
    "Gumbel": lambda r: ((r.x + r.v) / 0.5).softmax(-1),
    "cosine": lambda r: F.cosine_similarity(r.x, r.y, dim=-1),
    "covariance": covariance,
    "correlation": correlation,
    "a third moment of two": lambda r: ((r.x - mean(r.x)).square() * (r.y - mean(r.y))).mean(-1),
    "weighted variance": lambda r: (
        (r.w * (r.x - total(r.w * r.x) / total(r.w)).square()).sum(-1) / r.w.sum(-1)
    ),
    "weights of either sign": lambda r: (
        (r.v * (r.x - total(r.v * r.x) / total(r.v)).square()).sum(-1) / r.v.sum(-1)
    ),
    "weights that sum to 0": lambda r: ((r.v - mean(r.v)) * r.x).sum(-1),
    "variance below a softmax": variance_of_softmax,
    "difference of two softmaxes": lambda r: ((r.x.softmax(-1) - 0.5 * r.y.softmax(-1)) * r.v).sum(
        -1
    ),
    "norm of a sum": lambda r: scores(r.x + r.y) * r.w,
    "rest of a regression": lambda r: r.x - r.y * (total(r.x * r.y) / total(r.y * r.y)),
    "gradient of a softmax": gradient_of_softmax,
    "gradient of a norm": gradient_of_norm,
}
FUNCTIONS = QUICK | MORE
#: Of those what depends on where elements lie, not on what they are.
PLACED = frozenset(("preference", "focal", "smoothed cross entropy"))


def labels(x: Any, targets: Any) -> Any:
    """The divergence from targets that may be 0."""
    return F.kl_div(x.log_softmax(-1), targets, reduction="none").sum(-1)


def groups(x: Any, change: Callable[[Any], Any]) -> Any:
    """Something of each quarter of the rows."""
    return change(x.reshape(len(x), 4, -1)).reshape(x.shape)


def quantized(x: Any, most: float = 127) -> Any:
    scale = largest(x.abs()) / most + 1e-12
    return torch.round(x / scale) * scale


def shares(x: Any) -> Any:
    """Of what is above the largest less 1."""
    found = F.relu(x - largest(x) + 1)
    return found / total(found)


def decayed(x: Any) -> Any:
    """A variance in which an element weighs less than the one before it."""
    by = 0.9 ** torch.arange(x.shape[-1], dtype=x.dtype)
    return (by * (x - total(by * x) / total(by)).square()).sum(-1) / by.sum(-1)


def noise(r: Rows) -> Any:
    """The energy of what is left of y beside that of its projection on x, in decibels."""
    along = total(r.x * r.y) / (total(r.x * r.x) + 1e-8) * r.x
    rest = (r.y - along).square().sum(-1) + 1e-8
    return 10 * torch.log10((along.square().sum(-1) + 1e-8) / rest)


def likeness(r: Rows) -> Any:
    """A correlation whose divisor is bounded from below."""
    x, y = r.x - mean(r.x), r.y - mean(r.y)
    of = x.square().sum(-1).sqrt() * y.square().sum(-1).sqrt()
    return (x * y).sum(-1) / of.clamp_min(1e-8)


def middle_range(x: Any) -> Any:
    return (x - least(x)) / (largest(x) - least(x)).clamp_min(1e-8)


def shares_of_positive(x: Any) -> Any:
    return F.relu(x) / (total(F.relu(x)) + 1e-6)


#: Whose gradients are tested too: those that had faults; w is 1 at a label and 0 elsewhere.
TRAINED_QUICK: dict[str, Function] = {
    "least share": lambda r: r.x.softmax(-1).amin(-1),
    "largest of weighted scores": lambda r: (scores(r.x) * r.v).amax(-1),
    "by the largest magnitude": lambda r: r.x / largest(r.x.abs()),
    "divergence from a label": lambda r: labels(r.x, r.w),
    "products of exponentials": lambda r: (
        (r.x - largest(r.x)).exp() * (r.x * r.v - largest(r.x * r.v)).exp()
    ),
    "noise": noise,
    "likeness": likeness,
    "range above a bound": lambda r: middle_range(r.x),
    "shares of what is positive": lambda r: shares_of_positive(r.x),
    "clamped variance": lambda r: (r.x.square().mean(-1) - r.x.mean(-1).square()).clamp_min(0),
    "softmax of a layer norm": lambda r: F.layer_norm(r.x, r.x.shape[-1:]).softmax(-1),
    "softmax of standard scores": lambda r: (
        (r.x - mean(r.x)) * torch.rsqrt(r.x.var(-1, keepdim=True, correction=0) + 1e-5)
    ).softmax(-1),
    "correlation": lambda r: (
        ((r.x - mean(r.x)) * (r.y - mean(r.y))).mean(-1)
        / ((r.x - mean(r.x)) ** 2).mean(-1).mul(((r.y - mean(r.y)) ** 2).mean(-1)).add(1e-8).sqrt()
    ),
}
#: Others.
TRAINED: dict[str, Function] = TRAINED_QUICK | {
    "smoothed labels": lambda r: F.cross_entropy(r.x, r.at, label_smoothing=0.1, reduction="none"),
    "distillation": lambda r: divergence(r.y / 2, r.x / 2) * 4,
    "contrast by a temperature": lambda r: (r.x / 0.07).logsumexp(-1) - (r.x / 0.07)[:, 0],
    "by the length": lambda r: r.x / (r.x.norm(dim=-1, keepdim=True) + 1e-6),
    "by the sum of magnitudes": lambda r: r.x / total(r.x.abs()).clamp(min=1e-12),
    "capped": lambda r: (30 * torch.tanh(r.x / 30)).softmax(-1),
    "masked softmax": lambda r: r.x.masked_fill(~r.seen, -torch.inf).softmax(-1),
    "masked variance": lambda r: (
        torch.where(r.seen, r.x - total(torch.where(r.seen, r.x, 0)) / total(1.0 * r.seen), 0)
        .square()
        .sum(-1)
    ),
    "root mean squares of groups": lambda r: groups(r.x, root_mean_square),
    "standard scores of groups": lambda r: groups(r.x, scores),
    "quantized": lambda r: quantized(r.x),
    "range": lambda r: (r.x - least(r.x)) / (largest(r.x) - least(r.x) + 1e-6),
    "squared normaliser": lambda r: r.x.logsumexp(-1).square(),
    "router by sigmoids": lambda r: torch.sigmoid(r.x) / (total(torch.sigmoid(r.x)) + 1e-9),
    "norm of a gated": lambda r: root_mean_square(F.silu(r.x) * r.y),
    "gated norm": lambda r: root_mean_square(r.x) * torch.sigmoid(r.y),
    "shares": lambda r: shares(r.x),
    "cubic norm": lambda r: r.x / (mean(r.x.abs() ** 3) + 1e-6) ** (1 / 3),
    "noisy": lambda r: ((r.x - (r.v + 1e-9).log()) / 0.5).softmax(-1),
    "one against all": lambda r: 1 - picked(r.x, r.at) - r.x.softmax(-1)[:, 0],
    "triplets": lambda r: F.relu(
        (r.x - r.y).square().sum(-1).sqrt() - (r.x - r.v).square().sum(-1).sqrt() + 1
    ),
    "scaled to a length": lambda r: r.x * (9.8 / r.x.norm(dim=-1, keepdim=True).clamp(min=1e-5)),
    "weighted exponentials": lambda r: (
        ((r.x - largest(r.x)).exp() * r.v).sum(-1).log() + r.x.amax(-1)
    ),
    "distance from equal shares": lambda r: -r.x.log_softmax(-1).mean(-1),
    "variance by weights of all rows": lambda r: decayed(r.x),
    "cosine of distances": lambda r: F.cosine_similarity(r.x - mean(r.x), r.y - mean(r.y), dim=-1),
    "squashed": lambda r: (
        total(r.x**2) / (1 + total(r.x**2)) * r.x / torch.sqrt(total(r.x**2) + 1e-9)
    ),
    "clipped gradient": lambda r: (
        r.x * torch.clamp(1 / (r.x.norm(dim=-1, keepdim=True) + 1e-6), max=1)
    ),
    "concordance": lambda r: (
        2
        * covariance(r)
        / (r.x.var(-1, correction=0) + r.y.var(-1, correction=0) + (r.x - r.y).mean(-1) ** 2 + 1e-8)
    ),
    "overlap": lambda r: (
        1 - (2 * (r.x.sigmoid() * r.w).sum(-1) + 1) / (r.x.sigmoid().sum(-1) + r.w.sum(-1) + 1)
    ),
    "flatness": lambda r: (r.x**2 + 1e-10).log().mean(-1).exp() / (r.x**2 + 1e-10).mean(-1),
    "sparseness": lambda r: r.x.abs().sum(-1) / (r.x.norm(dim=-1) + 1e-8),
    "rest of a projection": lambda r: r.x - total(r.x * r.y) / (total(r.y * r.y) + 1e-8) * r.y,
    "pooled by a gate": lambda r: (r.x.sigmoid() * r.v).sum(-1) / (r.x.sigmoid().sum(-1) + 1e-6),
    "mean distance": lambda r: (r.x - mean(r.x)).abs().mean(-1),
}
