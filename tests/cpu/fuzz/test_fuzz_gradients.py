"""Gradients of random programs: those of torch's autograd, or refused for a true reason."""

from __future__ import annotations

import pytest
import torch
from hypothesis import event, given, settings

from cpu.autodiff.evaluate import run
from cpu.fuzz.gradient_programs import Random, programs
from crossfuse.autodiff import gradients
from crossfuse.errors import GradientRefused

# All examples together; the nightly profile has 2000.
pytestmark = pytest.mark.timeout(3600)
LIMIT = 1e-9
EXAMPLES = 60 if settings.default.max_examples < 100 else 2000


@settings(max_examples=EXAMPLES)
@given(programs())
def test_a_gradient_is_refused_or_right(program: Random) -> None:
    func = program.function()
    generator = torch.Generator().manual_seed(0)
    # Few numbers, so that maxima have ties and products zeros.
    arrays = {
        f"X{at}": (torch.randn(shape, generator=generator, dtype=torch.float64) * 2).round() / 2
        for at, shape in enumerate(program.inputs)
    }
    try:
        found = gradients(func)
    except GradientRefused as error:
        assert not program.is_affine, f"{error}\n{func}"
        assert "is a product of variables" in error.refusal.found
        event("refused")
        return
    event("right")
    inputs = {name: each.requires_grad_() for name, each in arrays.items()}
    (due,) = run(func, inputs).values()
    cotangent = torch.randn(due.shape, generator=generator, dtype=torch.float64)
    expected = dict.fromkeys(inputs)
    if due.requires_grad:
        each = torch.autograd.grad(due, list(inputs.values()), cotangent, allow_unused=True)
        expected = dict(zip(inputs, each, strict=True))
    with torch.no_grad():
        read = {**inputs, str(func.params[-1].name): due, found.given[0]: cotangent}
        names = (*found.inputs, *found.kept, *found.given)
        got = run(found.function, {each: read[each] for each in names})
    for name, gradient in expected.items():
        due = torch.zeros_like(inputs[name]) if gradient is None else gradient
        error = (got[found.results[name]] - due).abs()
        assert bool((error <= LIMIT * max(1.0, float(due.abs().max()))).all()), f"{name}\n{func}"
