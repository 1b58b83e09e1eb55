"""What a gradient takes and gives: names, types, what is kept and what is computed again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tvm import te, tirx, topi

from cpu.autodiff.evaluate import run
from crossfuse.autodiff import Gradients, gradients
from crossfuse.blocks.read import read_blocks


def named(function: Any) -> list[str]:
    return [str(each.name) for each in function.params]


def blocks(found: Gradients) -> list[str]:
    return sorted(each.name for each in read_blocks(found.function))


def gated(dtype: str = "float64") -> Any:
    x, y = te.placeholder((3, 4), dtype, "X"), te.placeholder((3, 4), dtype, "Y")
    gate = te.compute((3, 4), lambda i, j: tirx.exp(x[i, j]), name="gate")
    return te.create_prim_func([x, y, te.compute((3, 4), lambda i, j: gate[i, j] * y[i, j], "out")])


def test_parameters_are_what_is_read_what_is_given_and_results() -> None:
    found = gradients(gated())
    assert named(found.function) == ["X", "Y", "d_out", "d_X", "d_Y"]
    assert (found.inputs, found.kept, found.given) == (("X", "Y"), (), ("d_out",))
    assert found.results == {"X": "d_X", "Y": "d_Y"}
    assert blocks(found) == ["d_X", "d_Y", "d_gate", "gate"]


def test_only_what_is_asked_for_is_computed() -> None:
    found = gradients(gated(), wrt=["Y"])
    assert named(found.function) == ["X", "d_out", "d_Y"]
    assert blocks(found) == ["d_Y", "gate"]


def test_kept_intermediates_are_parameters_here_and_of_the_forward_function() -> None:
    func = gated()
    found = gradients(func, wrt=["Y"], keep=["gate"])
    assert named(found.function) == ["gate", "d_out", "d_Y"]
    assert blocks(found) == ["d_Y"]
    assert named(found.forward) == ["X", "Y", "out", "gate"]
    assert gradients(func).forward.same_as(func)
    arrays = {name: torch.randn(3, 4, dtype=torch.float64) for name in "XY"}
    stored = run(found.forward, arrays)
    assert torch.equal(stored["gate"], arrays["X"].exp())
    got = run(found.function, {"gate": stored["gate"], "d_out": arrays["Y"]})
    assert torch.equal(got["d_Y"], arrays["Y"] * stored["gate"])


def test_outputs_are_kept_where_they_are_read() -> None:
    x = te.placeholder((3, 4), "float64", "X")
    found = gradients(te.create_prim_func([x, topi.max(x, 1)]))
    assert len(found.kept) == 1
    # The largest of computed values is compared with these, so it is computed with them.
    found = gradients(te.create_prim_func([x, topi.max(topi.exp(x), 1)]))
    assert found.kept == ()


def test_several_outputs_each_have_a_gradient() -> None:
    x = te.placeholder((5,), "float64", "X")
    double = te.compute((5,), lambda i: x[i] * 2.0, name="double")
    square = te.compute((5,), lambda i: double[i] * double[i], name="square")
    found = gradients(te.create_prim_func([x, double, square]))
    assert found.given == ("d_double", "d_square")
    values = torch.arange(5, dtype=torch.float64)
    ones = torch.ones(5, dtype=torch.float64)
    arrays = {"X": values, "double": 2 * values, "d_double": ones, "d_square": ones}
    got = run(found.function, {name: arrays[name] for name in (*found.kept, *found.given)})
    assert torch.equal(got["d_X"], 2 + 8 * values)


def test_outputs_of_integers_have_none() -> None:
    x = te.placeholder((5,), "float64", "X")
    whole = te.compute((5,), lambda i: x[i].astype("int32"), name="whole")
    square = te.compute((5,), lambda i: x[i] * x[i], name="square")
    assert gradients(te.create_prim_func([x, whole, square])).given == ("d_square",)


def test_an_input_that_nothing_depends_on_has_zeros() -> None:
    x, y = te.placeholder((3,), "float64", "X"), te.placeholder((3,), "float64", "Y")
    func = te.create_prim_func([x, y, te.compute((3,), lambda i: x[i] + tirx.floor(y[i]), "out")])
    found = gradients(func)
    got = run(found.function, {"d_out": torch.ones(3, dtype=torch.float64)})
    assert torch.equal(got["d_Y"], torch.zeros(3, dtype=torch.float64))


def test_names_that_are_taken_are_left_alone() -> None:
    x, d = te.placeholder((3,), "float64", "X"), te.placeholder((3,), "float64", "d_X")
    func = te.create_prim_func([x, d, te.compute((3,), lambda i: x[i] * d[i], "out")])
    assert gradients(func).results == {"X": "d_X_", "d_X": "d_d_X"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_types_are_summed_in_float32(dtype: str) -> None:
    x, w = te.placeholder((8, 512), dtype, "X"), te.placeholder((512,), dtype, "W")
    y = te.compute((8, 512), lambda i, j: x[i, j] * w[j], name="Y")
    found = gradients(te.create_prim_func([x, w, y]))
    types = {each.name: str(each.buffer.ty.dtype) for each in read_blocks(found.function)}
    assert types == {"d_X": dtype, "d_W_from_Y": "float32", "d_W": dtype}
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    arrays = {
        name: torch.randn(shape, generator=generator).to(kind)
        for name, shape in (("X", (8, 512)), ("W", (512,)), ("d_Y", (8, 512)))
    }
    got = run(found.function, arrays)["d_W"]
    due = (arrays["X"].double() * arrays["d_Y"].double()).sum(0)
    step = float(torch.finfo(kind).eps)
    assert bool(((got - due).abs() <= step * (due.abs() + 1e-3)).all())


def test_casts_are_undone() -> None:
    x = te.placeholder((6,), "float16", "X")
    wide = te.compute((6,), lambda i: tirx.exp(x[i].astype("float32")), name="wide")
    found = gradients(te.create_prim_func([x, wide]))
    types = {str(each.name): str(each.ty.dtype) for each in found.function.params}
    assert types == {"X": "float16", "d_wide": "float32", "d_X": "float16"}


def test_wide_indices_stay_wide() -> None:
    """Functions of importers count in 64 bits, and may read labels of 64 bits."""
    x = te.placeholder([tirx.IntImm("int64", each) for each in (6, 4)], "float64", "X")
    label = te.placeholder([tirx.IntImm("int64", 6)], "int64", "Label")
    y = te.compute(
        x.shape,
        lambda i, j: tirx.Select(label[i] == j, x[i, (j + 1) % 4], tirx.const(0.0, "float64")),
        name="Y",
    )
    found = gradients(te.create_prim_func([x, label, y]))
    assert all(str(var.ty) == "int64" for b in read_blocks(found.function) for var in b.domain)
    label_values = torch.tensor([0, 1, 2, 3, 0, 1])
    got = run(found.function, {"Label": label_values, "d_Y": torch.ones(6, 4).double()})["d_X"]
    due = np.zeros((6, 4))
    due[np.arange(6), (label_values.numpy() + 1) % 4] = 1
    assert np.array_equal(got.numpy(), due)


def test_masks_of_data_are_not_read_beyond_their_end() -> None:
    """TVM joins choices in choices, and LLVM computes both conditions."""
    x, m = te.placeholder((9,), "float64", "X"), te.placeholder((4,), "float64", "M")
    zero = tirx.const(0.0, "float64")
    y = te.compute((4,), lambda i: tirx.if_then_else(m[i] > zero, x[2 * i], zero), name="Y")
    found = gradients(te.create_prim_func([x, m, y]), wrt=["X"])
    mask = torch.tensor([1.0, -1.0, float("nan"), 2.0]).double()
    got = run(found.function, {"M": mask, "d_Y": torch.full((4,), torch.inf).double()})["d_X"]
    assert got.tolist() == [torch.inf, 0, 0, 0, 0, 0, torch.inf, 0, 0]


def test_guards_that_say_the_same_as_a_gathers_bounds() -> None:
    """Both sides of a maximum are read under guards, which the bounds of the gather imply."""
    x = te.placeholder((2,), "float64", "X")
    zero, k = tirx.const(0.0, "float64"), te.reduce_axis((0, 4), "k")

    def read(index: Any) -> Any:
        return tirx.if_then_else(tirx.all(index >= 0, index < 2), x[index], zero)

    y = te.compute((3,), lambda i: te.max(tirx.max(read(i - k), read(k - i)), axis=k), name="Y")
    func = te.create_prim_func([x, y])
    values = torch.tensor([0.5, -1.0]).double().requires_grad_()
    due = run(func, {"X": values})["Y"]
    found = gradients(func)
    arrays = {"X": values, "Y": due, "d_Y": torch.ones(3).double()}
    with torch.no_grad():
        got = run(found.function, {e: arrays[e] for e in (*found.inputs, *found.kept, "d_Y")})
    assert torch.equal(got["d_X"], torch.autograd.grad(due, values, arrays["d_Y"])[0])


def test_derivatives_behind_a_cast_are_not_rounded() -> None:
    """A product in float32 that is stored in bfloat16: its factors are what they are in float32."""
    x, w = te.placeholder((64,), "float32", "X"), te.placeholder((64,), "float32", "W")
    y = te.compute((64,), lambda i: (x[i] * w[i]).astype("bfloat16"), name="Y")
    found = gradients(te.create_prim_func([x, w, y]), wrt=["X"])
    generator = torch.Generator().manual_seed(0)
    weights, given = (torch.randn(64, generator=generator) for _ in range(2))
    got = run(found.function, {"W": weights, "d_Y": given.bfloat16()})["d_X"]
    assert torch.equal(got, weights * given.bfloat16().float())
