"""Gradients of rows come out as cascades: they stream, and are what torch has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cpu.autodiff.evaluate import run
from cpu.autodiff.rows import ROWS, Rows
from crossfuse.autodiff import Gradients, gradients
from crossfuse.blocks.read import read_blocks
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate import run_sequential
from crossfuse.emulate.cuda import emulate
from crossfuse.lower.extract import lower
from crossfuse.planner.cascade.shape import function_of
from crossfuse.schedule.planned import schedule_cascade_of
from crossfuse.workload.cascade_numerics import adversarial_inputs, check, random_inputs
from crossfuse.workload.cascades import parse

KINDS = ("softmax", "log_softmax", "cross_entropy", "rmsnorm", "layernorm", "variance")
WITH_RESIDUALS = (*KINDS, "rmsnorm:residual", "layernorm:residual")

#: What of each is reduced, and how often it is in the state: maxima, sums and moments of the
#: function, and those of what is given.
STAGES = {
    "softmax": ["T_softmax_maxelem", "T_softmax_expsum", "d_T_softmax_expsum"],
    "log softmax": ["T_softmax_maxelem", "compute", "d_compute_"],
    "logsumexp": ["m", "s"],
    "cross entropy, mean of rows": ["m", "s"],
    "entropy": ["m", "s", "mean"],
    "weighted by a softmax": ["m", "s"],
    "layer norm": ["total", "squares", "d_mean_from_y", "d_scale"],
    "RMS norm": ["d_scale", "squares"],
    "variance": ["total"],
}


def torch_gradient(rows: Rows) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Arrays by the names of a gradient's parameters, outputs among them, and what is due."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape: Any) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = [draw(each) for each in rows.shapes]
    inputs[0].requires_grad_()
    found = rows.torch(*inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    given = [draw(each.shape) for each in outputs]
    (due,) = torch.autograd.grad(outputs, inputs[0], given)
    named = list(rows.function().params)[len(inputs) :]
    arrays = dict(zip("XYZW", inputs, strict=False))
    for each, output, gradient in zip(named, outputs, given, strict=True):
        arrays |= {str(each.name): output, f"d_{each.name}": gradient}
    return arrays, due


def parameters(found: Gradients, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: arrays[name] for name in (*found.inputs, *found.kept, *found.given)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_is_that_of_torch_plain_and_streamed(name: str) -> None:
    found = gradients(ROWS[name].function(), wrt=["X"])
    arrays, due = torch_gradient(ROWS[name])
    given = parameters(found, arrays)
    assert torch.allclose(run(found.function, given)["d_X"], due, rtol=1e-9, atol=1e-12)
    for cluster in (1, 2):
        tiles = StreamTiles(32, cluster=cluster)
        schedule = schedule_cascade_of(found.function, "stream", vars(tiles))
        (got,) = run_sequential(
            schedule, [each.detach().numpy() for each in given.values()]
        ).outputs.values()
        np.testing.assert_allclose(got, due.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", STAGES)
def test_reduces_what_is_needed_and_nothing_twice(name: str) -> None:
    """What reaches a maximum that is subtracted is 0, and no number of ties is counted."""
    function = gradients(ROWS[name].function(), wrt=["X"]).function
    (site,) = detect(function)
    assert [each.name for each in site.cascade.stages] == STAGES[name]
    assert not any(each.name.endswith("_ties") for each in read_blocks(function))


def test_a_sum_of_products_is_read_from_the_output() -> None:
    """``sum(d_y * y)`` over what a softmax weighs is the output times its own gradient."""
    found = gradients(ROWS["weighted by a softmax"].function(), wrt=["X"])
    assert found.kept == ("pooled",)


def test_moments_about_the_mean_are_not_put_together() -> None:
    """A sum of squared distances is not made of other sums, which would cancel."""
    function = gradients(ROWS["layer norm"].function(), wrt=["X"]).function
    assert "squares" in [each.name for each in read_blocks(function) if each.combine]


def test_a_maximum_that_is_not_subtracted_keeps_its_gradient() -> None:
    from tvm import te

    x, k = te.placeholder((3, 4), "float64", "X"), te.reduce_axis((0, 4), "k")
    m = te.compute((3,), lambda i: te.max(x[i, k], axis=k), name="m")
    y = te.compute((3, 4), lambda i, j: x[i, j] * m[i], name="Y")
    found = gradients(te.create_prim_func([x, y]))
    assert any(each.name == "m_ties" for each in read_blocks(found.function))
    values = torch.arange(12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    given = torch.ones(3, 4, dtype=torch.float64)
    (values * values.amax(1, keepdim=True)).backward(given)
    got = run(found.function, {"X": values, "d_Y": given})["d_X"]
    assert torch.allclose(got, values.grad)


def spec_of(kind: str, rest: str) -> Any:
    name, _, residual = kind.partition(":")
    return parse(f"{name}:{rest}{',residual' * bool(residual)},grad")


def cases(spec: Any) -> dict[str, dict[str, np.ndarray]]:
    usual = random_inputs(spec)
    found = {"usual": usual, **dict(adversarial_inputs(spec))}
    noise = np.random.default_rng(0).standard_normal(usual["x"].shape)
    far = {
        "close": 1e4 + 1e-2 * noise,
        "far": 1e4 + noise,
        "zeros": 0 * noise,
        "equal": 0 * noise + 9,
    }
    for name, values in far.items():
        found[name] = {**usual, "x": values.astype(usual["x"].dtype)}
    return found


@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", WITH_RESIDUALS)
def test_errs_no_more_than_separate_kernels(kind: str, dtype: str, cluster: int) -> None:
    spec = spec_of(kind, f"rows=2,cols=45,dtype={dtype}")
    tiles = StreamTiles(32, cluster=cluster, resident="registers")
    schedule = schedule_cascade_of(function_of(spec), "stream", vars(tiles))
    for name, inputs in cases(spec).items():
        outputs = run_sequential(schedule, list(inputs.values())).outputs
        for checked in check(spec, inputs, outputs).values():
            assert checked.worst <= 1, name


@pytest.mark.parametrize("kind", WITH_RESIDUALS)
def test_rows_of_one_element(kind: str) -> None:
    """Everything cancels; what is left are the last digits of what did."""
    spec = spec_of(kind, "rows=5,cols=1,dtype=float32")
    schedule = schedule_cascade_of(function_of(spec), "stream", vars(StreamTiles(32)))
    for name, inputs in cases(spec).items():
        (found,) = run_sequential(schedule, list(inputs.values())).outputs.values()
        due = prim_values(spec, inputs)
        # 1 / sqrt(1e-5) is the largest factor of any of them.
        size = 317 * max(
            float(np.abs(each).max()) for each in inputs.values() if each.dtype != "i4"
        )
        size = 4 * 317 if "norm" not in kind else size
        np.testing.assert_allclose(found, due, atol=4 * 2**-24 * size, err_msg=name)


def prim_values(spec: Any, inputs: dict[str, np.ndarray]) -> np.ndarray:
    from crossfuse.workload.cascade_numerics import reference

    (found,) = reference(spec, inputs).values()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "threads", "cluster", "resident"),
    [
        ("rmsnorm:rows=2,cols=520,residual,grad", 32, 1, "shared"),
        ("softmax:rows=2,cols=1032,grad", 32, 2, "registers"),
        ("log_softmax:rows=2,cols=520,grad", 32, 1, "registers"),
        ("layernorm:rows=2,cols=520,grad", 32, 2, "none"),
        ("cross_entropy:rows=2,cols=520,grad", 32, 2, "registers"),
    ],
)
def test_generated_cuda(text: str, threads: int, cluster: int, resident: str) -> None:
    spec = parse(text)
    tiles = StreamTiles(threads, cluster=cluster, resident=resident)
    image = lower(schedule_cascade_of(function_of(spec), "stream", vars(tiles))).image
    inputs = random_inputs(spec)
    report = emulate(image, inputs, orders=1)
    report.raise_if_wrong()
    assert all(each.worst <= 1 for each in check(spec, inputs, report.outputs).values())


def test_sums_that_look_alike_are_not_the_same() -> None:
    """Choices of two tensors, and sums over loops in another order."""
    from tvm import te, tirx

    shape = (4, 4)
    x, y = (te.placeholder(shape, "float64", name) for name in "XY")

    def total(name: str, value: Any) -> Any:
        k = te.reduce_axis((0, 4), "k")
        return te.compute((4,), lambda i: te.sum(value(i, k), axis=k), name)

    zero = tirx.const(0.0, "float64")
    a = total("a", lambda i, k: tirx.Select(k < i, x[i, k], zero))
    b = total("b", lambda i, k: tirx.Select(k < i, y[i, k], zero))
    c = total("c", lambda i, k: x[k, i] * a[i])
    d = total("d", lambda i, k: x[i, k] * b[i])
    out = te.compute((4,), lambda i: a[i] * b[i] + c[i] * d[i], "out")
    found = gradients(te.create_prim_func([x, y, out]), wrt=["X"])
    generator = torch.Generator().manual_seed(0)
    given = {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n in "XY"}
    given["X"].requires_grad_()
    below = torch.ones(4, 4, dtype=torch.float64).tril(-1)
    one, two = ((given[name] * below).sum(1) for name in "XY")
    values = one * two + (given["X"].sum(0) * one) * (given["X"].sum(1) * two)
    values.backward(torch.arange(4, dtype=torch.float64))
    got = run(found.function, {**given, "d_out": torch.arange(4, dtype=torch.float64)})["d_X"]
    assert torch.allclose(got, given["X"].grad, rtol=1e-9, atol=1e-12)


def test_a_maximum_of_one_value_and_0_is_not_that_value() -> None:
    from tvm import te, tirx

    x, y = (te.placeholder((5,), "float64", name) for name in "XY")
    k = te.reduce_axis((0, 1), "k")
    positive = te.comm_reducer(lambda a, b: tirx.max(a, b), lambda _: tirx.const(0.0, "float64"))
    m = te.compute((5,), lambda i: positive(y[i], axis=k), "m")
    away = te.compute((5,), lambda i: x[i] * (y[i] - m[i]), "away")
    out = te.compute((5,), lambda i: away[i] * away[i], "out")
    found = gradients(te.create_prim_func([x, y, out]), wrt=["X"], keep=["m"])
    values = torch.tensor([-2.0, -1.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    ones = torch.ones(5, dtype=torch.float64)
    arrays = {"X": ones, "Y": values, "m": values.clamp(min=0), "d_out": ones}
    got = run(found.function, arrays)["d_X"]
    assert torch.equal(got, 2 * values.clamp(max=0) ** 2)
