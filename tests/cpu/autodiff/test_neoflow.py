"""Examples of NeoFlow (TPDS 2021, 10.1109/TPDS.2021.3138862), forward and backward, on LLVM."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tvm import te, tirx

from cpu.autodiff.llvm import Compiled
from crossfuse.autodiff import Gradients, gradients
from crossfuse.blocks.read import read_blocks

LIMIT = 1e-9


def halved_convolution(x: Any, w: Any) -> Any:
    """A strided and dilated convolution that reads each column for two columns of the result."""
    c, r, s = (te.reduce_axis((0, each)) for each in (3, 3, 2))
    return te.compute(
        (2, 4, 5, 6),
        lambda n, k, p, q: te.sum(
            x[n, c, 2 * p + 3 * r, q // 2 + 2 * s] * w[k, c, r, s], axis=[c, r, s]
        ),
        name="Y",
    )


def halved_in_torch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    found = F.conv2d(x, w, stride=(2, 1), dilation=(3, 2))
    return found.repeat_interleave(2, 3)


def graph(x: Any, w: Any, other: Any) -> Any:
    """Padding, a dilated convolution, depth to space, and a concatenation with another image."""
    zero = tirx.const(0.0, "float64")
    padded = te.compute(
        (1, 3, 9, 9),
        lambda n, c, i, j: tirx.Select(
            tirx.all(i >= 2, i < 7, j >= 2, j < 7), x[n, c, i - 2, j - 2], zero
        ),
        name="padded",
    )
    c, r, s = (te.reduce_axis((0, each)) for each in (3, 3, 3))
    product = te.compute(
        (1, 8, 5, 5),
        lambda n, k, p, q: te.sum(padded[n, c, p + 2 * r, q + 2 * s] * w[k, c, r, s], [c, r, s]),
        name="product",
    )
    spread = te.compute(
        (1, 2, 10, 10),
        lambda n, c, i, j: product[n, (i % 2 * 2 + j % 2) * 2 + c, i // 2, j // 2],
        name="spread",
    )
    return te.compute(
        (1, 5, 10, 10),
        lambda n, c, i, j: tirx.if_then_else(c < 2, spread[n, c, i, j], other[n, c - 2, i, j]),
        name="joined",
    )


def graph_in_torch(x: torch.Tensor, w: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    product = F.conv2d(F.pad(x, (2, 2, 2, 2)), w, dilation=2)
    blocks = product.reshape(1, 2, 2, 2, 5, 5)  # two places of a block, then channels
    return torch.cat([blocks.permute(0, 3, 4, 1, 5, 2).reshape(1, 2, 10, 10), other], 1)


def capsules(x: Any, w: Any) -> Any:
    """A convolution whose elements are 2 x 2 matrices, that are multiplied."""
    c, r, s, m = (te.reduce_axis((0, each)) for each in (3, 3, 3, 2))
    return te.compute(
        (2, 4, 2, 2, 2, 2),
        lambda n, k, p, q, i, j: te.sum(
            x[n, c, 2 * p + r, 2 * q + s, i, m] * w[k, c, r, s, m, j], axis=[c, r, s, m]
        ),
        name="Y",
    )


def capsules_in_torch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    windows = x.unfold(2, 3, 2).unfold(3, 3, 2)
    return torch.einsum("ncpqimrs,kcrsmj->nkpqij", windows, w)


CASES: dict[str, tuple[Any, Callable[..., torch.Tensor], tuple[tuple[int, ...], ...], int]] = {
    "halved convolution": (
        halved_convolution,
        halved_in_torch,
        ((2, 3, 15, 5), (4, 3, 3, 2)),
        # x: k, one or two of r, s, and which half of a column; w: n, p, q
        2 * 3 * 15 * 5 * (4 * 3 * 2 * 2) + 4 * 3 * 3 * 2 * (2 * 5 * 6),
    ),
    "graph": (graph, graph_in_torch, ((1, 3, 5, 5), (8, 3, 3, 3), (1, 3, 10, 10)), 0),
    "capsule convolution": (
        capsules,
        capsules_in_torch,
        ((2, 3, 5, 5, 2, 2), (4, 3, 3, 3, 2, 2)),
        # x: k, j, and two of r and of s at most
        2 * 3 * 5 * 5 * 4 * (4 * 2 * 2 * 2) + 4 * 3 * 3 * 3 * 4 * (2 * 2 * 2 * 2),
    ),
}


@cache
def compiled() -> tuple[dict[str, Gradients], Compiled]:
    """Gradients of all examples, and all functions forward and backward."""
    functions, found = {}, {}
    for name, (made, _, shapes, _) in CASES.items():
        given = [te.placeholder(s, "float64", "XWO"[at]) for at, s in enumerate(shapes)]
        functions[name] = te.create_prim_func([*given, made(*given)])
        found[name] = gradients(functions[name])
        functions[f"{name}, backward"] = found[name].function
    return found, Compiled(functions)


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name: str) -> None:
    found, run = compiled()[0][name], compiled()[1]
    _, other, shapes, _ = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "XWO"[at]: torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_()
        for at, s in enumerate(shapes)
    }
    due = other(*inputs.values())
    (output,) = run(name, inputs).values()
    assert float((output - due).detach().abs().max()) <= LIMIT
    cotangent = torch.randn(due.shape, generator=generator, dtype=torch.float64)
    read = {**inputs, found.given[0]: cotangent}
    got = run(f"{name}, backward", {each: read[each] for each in (*found.inputs, *found.given)})
    expected = torch.autograd.grad(due, list(inputs.values()), cotangent)
    for key, each in zip(inputs, expected, strict=True):
        assert float((got[found.results[key]] - each).abs().max()) <= LIMIT, key


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][3]])
def test_no_more_is_gathered_than_was_multiplied(name: str) -> None:
    """As many iterations as there are products, and those of windows that are cut by an edge."""
    found = compiled()[0][name]
    sums = [each for each in read_blocks(found.function) if each.combine]
    assert sum(prod(each.domain.values()) for each in sums) <= CASES[name][3]
