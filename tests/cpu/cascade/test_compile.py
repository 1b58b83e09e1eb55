"""Cascades through `crossfuse.compile`: specs and functions to checked kernels."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

import crossfuse
from crossfuse.cascade.rewrite.tiled.choose import choose_product_tiles
from crossfuse.cli import app
from crossfuse.compiler.cascades import only_site
from crossfuse.errors import CascadeRefused
from crossfuse.hardware import device
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascades import resolve

H100 = device("nvidia-h100")


@pytest.mark.parametrize(
    "text",
    [
        "softmax:rows=3,cols=200",
        "moment_of_inertia:bodies=2,points=70",
        "attention:batch=1,heads=2,q_len=40,kv_len=70,head_dim=64,kv_heads=1,causal=true",
        "moe_routing:tokens=20,hidden=128,experts=16,top_k=2",
    ],
)
def test_a_spec_becomes_a_checked_kernel(text: str) -> None:
    found = {each.name: each for each in crossfuse.check(crossfuse.compile(text), gpu=False)}
    assert {each.status for each in found.values()} == {"passed"}, found
    assert "0 bytes spilled" in found["cubin for sm_90a"].detail


def test_a_function_becomes_a_kernel() -> None:
    spec = resolve("cross_entropy:rows=2,cols=50")
    compiled = crossfuse.compile(prim_func(spec))
    assert compiled.source.cascade is None
    assert compiled.artefact.manifest.metadata["stream"]["cluster"] == 1
    assert {each.status for each in crossfuse.check(compiled, gpu=False)} == {"passed"}


def test_few_rows_share_their_axis_over_a_cluster() -> None:
    from crossfuse.cascade.algebra import derive

    def clusters(text: str) -> list[int]:
        site = only_site(prim_func(resolve(text)))
        return [each.cluster for each in choose_product_tiles(site, derive(site.cascade), H100)]

    assert clusters("R3:batch=1")[:3] == [8, 4, 2]
    assert set(clusters("R3")) == {1}
    assert set(clusters("R1")) == {1}


def test_functions_that_count_in_64_bits_lower() -> None:
    from tvm import relax

    from crossfuse.compiler.cascades import cascade_options
    from crossfuse.compiler.source import read_source
    from crossfuse.lower.extract import lower

    shapes = [(1, 64, 1, 64), (1, 128, 1, 64), (1, 128, 1, 64)]
    given = [relax.Var(f"a{i}", relax.TensorType(s, "float16")) for i, s in enumerate(shapes)]
    builder = relax.BlockBuilder()
    with builder.function("main", given):
        builder.emit_func_output(builder.emit(relax.op.nn.attention(*given)))
    (func,) = (
        each
        for each in relax.transform.LegalizeOps()(builder.get()).functions.values()
        if not isinstance(each, relax.Function)
    )
    (option, *_) = cascade_options(read_source(func), H100)
    assert lower(option.make(), H100).image.launches


def two_axes() -> Any:
    from tvm import te

    rows = te.placeholder((4, 8), "float32", "X")
    k, j = te.reduce_axis((0, 8), "k"), te.reduce_axis((0, 4), "j")
    across = te.compute((4,), lambda i: te.sum(rows[i, k], axis=k), name="across")
    down = te.compute((8,), lambda i: te.sum(rows[j, i], axis=j), name="down")
    return te.create_prim_func([rows, across, down])


def test_two_cascades_are_not_one_kernel() -> None:
    with pytest.raises(CascadeRefused) as caught:
        crossfuse.compile(two_axes())
    assert str(caught.value) == (
        "compile: function: found 2 cascades over different axes; limit: one, which becomes one "
        "kernel. Instead: split the function between them, or run crossfuse.relax.FuseCascades on "
        "its model."
    )


def test_explain_derives() -> None:
    text = CliRunner().invoke(app, ["explain", "softmax:rows=64,cols=1024"])
    assert text.exit_code == 0, text.output
    assert "s' = s·exp(m - m~) + Σ exp(x - m~)" in text.output
    assert "Stream of threads: threads=" in text.output
    out = CliRunner().invoke(app, ["explain", "R1", "--json"])
    found = json.loads(out.stdout)
    assert [each["name"] for each in found["slots"]] == ["m", "o", "s"]
    assert found["form"] == "Stream of tiles"
    assert found["tiles"]["cluster"] == 1
