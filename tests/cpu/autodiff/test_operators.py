"""Gradients of operators against torch's, in float64."""

from __future__ import annotations

import pytest
import torch

from cpu.autodiff.evaluate import run
from cpu.autodiff.llvm import Compiled
from cpu.autodiff.operators import OPERATORS, Operator, positive
from crossfuse.autodiff import gradients

#: Largest error, relative to the largest number of a gradient or 1.
LIMIT = 1e-9


def inputs_of(operator: Operator, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in operator.shapes:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = operator.inputs(x).reshape(shape) if operator.inputs else x
        found.append(x.requires_grad_())
    return found


def close(got: torch.Tensor, due: torch.Tensor) -> bool:
    assert got.shape == due.shape
    scale = max(1.0, float(due.abs().max())) if due.numel() else 1.0
    return bool(((got - due).abs() <= LIMIT * scale).all())


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_are_those_of_torch(name: str) -> None:
    operator = OPERATORS[name]
    inputs = inputs_of(operator)
    due = operator.torch(*inputs)
    given = torch.randn(due.shape, generator=torch.Generator().manual_seed(1), dtype=due.dtype)
    func = operator.function()
    arrays = {str(each.name): x.detach() for each, x in zip(func.params, inputs, strict=False)}
    (output,) = run(func, arrays).values()
    assert close(output, due.detach())
    found = gradients(func)
    (cotangent,), (out,) = found.given, [str(func.params[-1].name)]
    read = {**arrays, out: output, cotangent: given}
    got = run(
        found.function, {each: read[each] for each in (*found.inputs, *found.kept, cotangent)}
    )
    expected = torch.autograd.grad(due, inputs, given)
    for at, each in enumerate(expected):
        parameter = found.results[str(func.params[at].name)]
        assert close(got[parameter], each), parameter


#: One of each kind of block, and of what keeps loads from being made.
ON_LLVM = (
    *("gelu", "power", "maximum with ties", "where", "product of sums", "maximum of an expression"),
    *("softmax", "layer norm", "causal attention", "heads that share keys", "largest of windows"),
    *("strided and dilated convolution", "windows as columns", "reflected edges", "concatenation"),
    *("reshape across", "slice", "diagonal", "product with a number", "trace"),
)


@pytest.mark.slow
def test_llvm_computes_the_same() -> None:
    """What is computed in torch above is what compilers are told."""
    found = {name: gradients(OPERATORS[name].function()) for name in ON_LLVM}
    compiled = Compiled({name: each.function for name, each in found.items()})
    for name, each in found.items():
        func = each.function
        shapes = {str(e.name): [int(x) for x in e.ty.shape] for e in func.params}
        generator = torch.Generator().manual_seed(2)
        given = {
            parameter: positive(torch.randn(shapes[parameter], generator=generator).double())
            for parameter in (*each.inputs, *each.kept, *each.given)
        }
        due, got = run(func, given), compiled(name, given)
        assert all(close(got[key], due[key]) for key in due), name


def test_there_are_as_many_as_promised() -> None:
    assert len(OPERATORS) >= 60
