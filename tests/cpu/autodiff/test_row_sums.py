"""Gradients by gains and biases: sums over rows come out of the stream that makes the rows'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from crossfuse import _tvm as ir
from crossfuse.autodiff import gradients
from crossfuse.cascade.rewrite.rows_first import column_sums, sites_of
from crossfuse.compiler.compiled import choose
from crossfuse.compiler.source import read_source
from crossfuse.emulate import run_sequential
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import draw, parameters
from crossfuse.errors import CascadeRefused, PlanRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.schedule.planned import schedule_cascade_of
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascades import parse

H200 = device("nvidia-h200")
#: Workload, what is differentiated by, and tiles: threads, vectors at once, groups of rows.
CASES = [
    ("rmsnorm:rows=8,cols=512", "x,weight", (32, 1, 2)),
    ("rmsnorm:rows=6,cols=520,dtype=float32", "x,weight", (64, 1, 3)),
    ("rmsnorm:rows=4,cols=264,residual=true", "x,weight", (32, 2, 4)),
    ("layernorm:rows=6,cols=520", "x,weight,bias", (64, 2, 3)),
    ("layernorm:rows=5,cols=45,dtype=float32", "weight", (32, 2, 1)),
]


def function(text: str, wrt: str) -> Any:
    return gradients(prim_func(parse(text)), wrt=wrt.split(",")).function


def scheduled(text: str, wrt: str, tiles: tuple[int, int, int]) -> Any:
    threads, unroll, groups = tiles
    fields = {"threads": threads, "unroll": unroll, "groups": groups}
    return schedule_cascade_of(function(text, wrt), "row_sums", fields)


def inputs_of(text: str, wrt: str, offset: float = 0.0) -> dict[str, np.ndarray]:
    found = draw(parameters(function(text, wrt)), 0)
    x = found["x"]
    return {**found, "x": (x.astype("f8") + offset).astype(x.dtype)}


def by_torch(text: str, inputs: dict[str, np.ndarray], dtype: torch.dtype) -> dict[str, Any]:
    """Gradients of a type, as float64."""

    def leaf(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values.astype("f8")).to(dtype).requires_grad_()

    x = leaf(inputs["x"])
    weight = leaf(inputs.get("weight", np.ones(x.shape[-1])))
    bias = leaf(np.zeros(x.shape[-1]))
    added = x + leaf(inputs["residual"]) if "residual" in inputs else x
    given = [leaf(inputs["d_y"]).detach()]
    if text.startswith("rms"):
        made = [F.rms_norm(added, x.shape[-1:], weight, 1e-5)]
    else:
        made = [F.layer_norm(added, x.shape[-1:], weight, bias, 1e-5)]
    if "d_h" in inputs:
        made, given = [*made, added], [*given, leaf(inputs["d_h"]).detach()]
    grads = torch.autograd.grad(made, (x, weight, bias), given, allow_unused=True)
    named = zip(("d_x", "d_weight", "d_bias"), grads, strict=True)
    return {name: each.double().numpy() for name, each in named if each is not None}


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize(("text", "wrt", "tiles"), CASES)
def test_errs_no_more_than_separate_kernels(
    text: str, wrt: str, tiles: tuple[int, int, int], offset: float
) -> None:
    inputs = inputs_of(text, wrt, offset)
    outputs = run_sequential(scheduled(text, wrt, tiles), list(inputs.values())).outputs
    assert set(outputs) == {f"d_{each}" for each in wrt.split(",")}
    exact = by_torch(text, inputs, torch.float64)
    kind = torch.float32 if "float32" in text else torch.bfloat16
    separate = by_torch(text, inputs, kind)
    for name, found in outputs.items():
        error = np.abs(found.astype("f8") - exact[name]).max()
        # What is stored rounds once, whatever computes it.
        last = np.abs(exact[name]).max() * (2**-23 if kind == torch.float32 else 2**-9)
        assert error <= 2 * max(np.abs(separate[name] - exact[name]).max(), last), name


@pytest.mark.parametrize(("text", "wrt", "tiles"), [CASES[0], CASES[3]])
def test_generated_cuda(text: str, wrt: str, tiles: tuple[int, int, int]) -> None:
    """In any order of threads and CTAs the same bits, which are those of the program on LLVM."""
    schedule, inputs = scheduled(text, wrt, tiles), inputs_of(text, wrt)
    image = lower(schedule).image
    sums = len(wrt.split(",")) - 1
    assert len(image.launches) == 1 + sums and len(image.workspaces) == sums
    report = emulate(image, inputs, orders=3)
    report.raise_if_wrong()
    due = run_sequential(schedule, list(inputs.values())).outputs
    for found in (report.outputs, *report.later):
        assert all(found[name].tobytes() == report.outputs[name].tobytes() for name in found)
    for name, each in report.outputs.items():
        np.testing.assert_allclose(each.astype("f8"), due[name].astype("f8"), rtol=2**-7, atol=1e-6)


def test_rows_wait_for_those_before() -> None:
    """Without barriers warps overwrite what others still merge: the emulator says so."""
    text, wrt, tiles = "rmsnorm:rows=4,cols=512", "x,weight", (64, 1, 1)
    image = lower(scheduled(text, wrt, tiles)).image
    head, barrier, rest = image.cuda.partition("__syncthreads();")
    assert barrier
    report = emulate(replace(image, cuda=f"{head}(void)0;{rest}"), inputs_of(text, wrt))
    assert not report.ok


def test_is_chosen_for_the_whole_function() -> None:
    source = read_source(function("rmsnorm:rows=512,cols=1024", "x,weight"))
    chosen = choose(source, H200)
    assert chosen.option.plan.family == "row_sums"
    launches = chosen.lowered.image.launches
    assert [each.grid[0] for each in launches] == [chosen.option.plan.tiles["groups"], 32]
    assert [each.name for each in chosen.lowered.image.buffers] == [
        *("x", "weight", "d_y"),
        *("d_x", "d_weight"),
    ]


def test_the_cut() -> None:
    cut = column_sums(function("layernorm:rows=8,cols=64", "x,weight,bias"))
    assert cut is not None
    assert cut.terms == ("d_weight_from_y_terms", "d_bias_from_y_terms")
    assert [str(each.name) for each in cut.rows.params][-3:] == ["d_x", *cut.terms]
    given = [[str(each.name) for each in func.params] for func in cut.added(4)]
    assert given == [["d_weight_from_y_partial", "d_weight"], ["d_bias_from_y_partial", "d_bias"]]


def test_a_row_times_a_matrix_is_no_sum_over_rows() -> None:
    from tvm import te

    x, w = te.placeholder((64,), "float32", "X"), te.placeholder((64, 32), "float32", "W")
    k, n = te.reduce_axis((0, 64), "k"), te.reduce_axis((0, 64), "n")
    s = te.compute((1,), lambda i: te.sum(x[k] * x[k], axis=k), name="s")
    y = te.compute((32,), lambda j: te.sum(x[n] / s[0] * w[n, j], axis=n), name="Y")
    assert column_sums(te.create_prim_func([x, w, y])) is None


def test_groups_are_of_as_many_rows() -> None:
    with pytest.raises(CascadeRefused) as caught:
        scheduled("rmsnorm:rows=8,cols=512", "x,weight", (32, 1, 3))
    assert str(caught.value) == (
        "cascade-stream: tiles, groups: found 3 groups of 8 rows; limit: a divisor of the number "
        "of rows. Instead: pass groups=1."
    )


def test_rows_that_do_not_divide_are_refused() -> None:
    source = read_source(function("rmsnorm:rows=4099,cols=512", "x,weight"))
    with pytest.raises(PlanRefused, match="rows that divide evenly among the CTAs"):
        choose(source, H200)


def test_other_families_have_no_sums() -> None:
    (site,) = sites_of(ir.narrow(function("rmsnorm:rows=8,cols=64", "x,weight")))
    assert [each.name for each in site.stored] == ["d_x"]
