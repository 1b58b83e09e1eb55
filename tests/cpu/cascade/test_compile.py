"""Cascades through `crossfuse.compile`: specs and functions to checked kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import te
from typer.testing import CliRunner

import crossfuse
from cascade_functions import softmax
from crossfuse.cli import app
from crossfuse.compiler.options import cascade_options, is_cascade
from crossfuse.compiler.source import read_source
from crossfuse.emulate import run_sequential
from crossfuse.errors import CascadeRefused, ScheduleRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.planner.cascade.plan import ranked_cascade
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascades import resolve

H100 = device("nvidia-h100")


@pytest.mark.parametrize(
    "text",
    [
        "softmax:rows=3,cols=200",
        "moment_of_inertia:bodies=2,points=70",
        "attention:batch=1,heads=2,q_len=40,kv_len=70,head_dim=64,kv_heads=1,causal=true",
        "mla_decode:batch=1,q_heads=128,kv_len=70,latent_dim=384,rope_dim=64",
        "moe_routing:tokens=20,hidden=128,experts=16,top_k=2",
        "rmsnorm_gemm:tokens=20,K=136,N=40",
        "rmsnorm_ffn:tokens=20,K=136,N=72",
        "quant_gemm:tokens=20,K=144,N=40",
        "layernorm:rows=3,cols=200,grad",
    ],
)
def test_a_spec_becomes_a_checked_kernel(text: str) -> None:
    found = {each.name: each for each in crossfuse.check(crossfuse.compile(text), gpu=False)}
    assert {each.status for each in found.values()} == {"passed"}, found
    assert "0 bytes spilled" in found["cubin for sm_90a"].detail


@pytest.mark.slow
def test_a_function_becomes_a_kernel() -> None:
    spec = resolve("cross_entropy:rows=2,cols=50")
    compiled = crossfuse.compile(prim_func(spec))
    assert compiled.source.cascade is None
    assert compiled.artefact.manifest.metadata["stream"]["cluster"] == 1
    assert {each.status for each in crossfuse.check(compiled, gpu=False)} == {"passed"}


@pytest.mark.slow
def test_a_result_that_is_one_number() -> None:
    x, (k, n) = te.placeholder((37,), name="X"), (te.reduce_axis((0, 37), name) for name in "kn")
    m = te.compute((), lambda: te.max(x[k], axis=k), name="m")
    s = te.compute((), lambda: te.sum(te.exp(x[n] - m[()]), axis=n), name="s")
    y = te.compute((), lambda: te.log(s[()]) + m[()], name="y")
    compiled = crossfuse.compile(te.create_prim_func([x, y]))
    assert [each.status for each in crossfuse.check(compiled, gpu=False)] == ["passed"] * 3
    given = np.linspace(-3, 4, 37, dtype=np.float32)
    (found,) = run_sequential(compiled.schedule, [given]).outputs.values()
    assert found.shape == ()
    np.testing.assert_allclose(found, np.log(np.exp(given.astype(float)).sum()), rtol=1e-6)


@pytest.mark.slow
def test_float64_stays_float64() -> None:
    """Its maximum starts at the least number, which TVM's text rounds."""
    compiled = crossfuse.compile(softmax(3, 37, "float64", "float64"))
    assert [each.status for each in crossfuse.check(compiled, gpu=False)] == ["passed"] * 3
    given = np.linspace(-3, 4, 3 * 37).reshape(3, 37)
    (found,) = run_sequential(compiled.schedule, [given]).outputs.values()
    due = np.exp(given) / np.exp(given).sum(-1, keepdims=True)
    np.testing.assert_allclose(found, due, rtol=1e-13)


def test_a_placement_chooses_where_states_merge() -> None:
    source = read_source("R3:batch=1")
    chosen = {
        place: cascade_options(source, H100, placement=place)[0] for place in ("dsm", "global")
    }
    assert chosen["dsm"].why["tiles"]["cluster"] == 8
    assert chosen["global"].why["tiles"]["merge"] == "kernel"
    assert [each.early for each in lower(chosen["global"].make()).image.launches] == [False, True]


@pytest.mark.slow
def test_a_norm_and_its_product_are_one_kernel() -> None:
    """It starts early where weights are constant; a spec without rows is left to other families."""
    source = read_source("R9")
    option, *others = cascade_options(source, H100, constant=True)
    assert option.plan is not None
    assert (option.plan.tiles["rows"], option.plan.tiles["columns"]) == (128, 192)
    assert option.why["plan"]["family"] == "rows"
    (launch,) = lower(option.make()).image.launches
    assert launch.helps and launch.early and not launch.cooperative
    assert option.plan.tiles["chunk"] == 0
    (late,) = lower(cascade_options(source, H100, option.plan)[0].make()).image.launches
    assert late.helps and not late.early
    assert {each.why["plan"]["family"] for each in others} == {"rows"}
    attention = cascade_options(read_source("R1"), H100)
    assert {each.why["plan"]["family"] for each in attention} == {"tiles"}


def test_quantised_rows_come_by_chunks_where_a_cta_has_many() -> None:
    chunks = [
        [
            each.plan.tiles["chunk"]
            for each in cascade_options(read_source(text), H100)
            if each.plan is not None and each.plan.family == "rows"
        ]
        for text in ("R6", "quant_gemm:tokens=256,K=1024,N=512")
    ]
    assert chunks[0][0] == 512
    assert not any(chunks[1])


#: The first plan of packaged cascades; where a table was measured its best, or within 2 % of it.
FIRST = {
    "R1": "rows=128 elements=128 cluster=1 share=1",
    "R2": "rows=128 elements=128 cluster=1 share=1",
    "R3": "rows=64 elements=128 cluster=1 share=1",
    "R3:batch=1": "rows=8 elements=128 cluster=16 share=1",
    "R4": "rows=64 elements=64 cluster=1 share=2",
    "R5": "rows=64 elements=128 cluster=1 share=1",
    "R6": "rows=128 columns=256 cluster=2 split=1 across=1 chunk=512",
    "R7": "threads=256 unroll=8 cluster=2 rows=1 resident=registers",
    "R8": "threads=256 unroll=8 cluster=1 rows=1 resident=none",
    "R9": "rows=128 columns=192 cluster=2 split=1 across=1",
    "R10": "threads=128 unroll=8 cluster=1 rows=1 resident=registers",
    "R11": "threads=256 unroll=8 cluster=1 rows=1 resident=none",
    "R12": "threads=256 unroll=2 cluster=1 rows=1 resident=none",
    "R13": "threads=256 unroll=8 cluster=2 rows=1 resident=registers",
    "R14": "threads=256 unroll=4 cluster=1 rows=1 resident=registers",
}


@pytest.mark.parametrize("text", FIRST)
def test_the_first_kernel_of_packaged_cascades(text: str) -> None:
    plans = (each.plan for each in cascade_options(read_source(text), H100))
    plan = next(each for each in plans if each is not None)
    tiles = " ".join(f"{key}={value}" for key, value in plan.tiles.items() if value)
    assert tiles == FIRST[text]


def test_kernels_that_need_fewer_registers_come_next() -> None:
    plans = ranked_cascade("R3:batch=1", H100, only=("tiles",))
    by_size: dict[int, list[int]] = {}
    for each in plans:
        by_size.setdefault(each.tiles["cluster"], []).append(each.tiles["elements"])
    # An H100 holds 7 clusters of 16 at once, and there are 8 heads of keys.
    assert set(by_size) == {1, 2, 4, 8}
    assert all(found == sorted(found, reverse=True) for found in by_size.values())


@pytest.mark.parametrize(
    ("text", "clusters"),
    [
        # Each tile of rows ends at a key of its own, so that none go side by side.
        ("attention:batch=1,heads=2,q_len=200,kv_len=333,head_dim=512,causal=true", {1}),
        ("mla_decode:batch=1,q_heads=128,kv_len=4096,latent_dim=512,rope_dim=64", {1, 2}),
    ],
)
def test_all_tiles_of_wide_sums_lower(text: str, clusters: set[int]) -> None:
    source = read_source(text)
    plans = ranked_cascade(text, only=("tiles",))
    assert {each.taken.cluster for each in plans if each.taken is not None} == clusters
    for plan in plans:
        (option,) = cascade_options(source, H100, plan)
        assert lower(option.make(), H100).image.launches


def test_functions_that_count_in_64_bits_lower() -> None:
    from tvm import relax

    from crossfuse.compiler.options import cascade_options
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


def of_one_tensor(row: Any) -> Any:
    """Products of rows with each other, or sums of exponentials below the maximum of a row."""
    from tvm import te

    x = te.placeholder((8, 64), "float32", name="X")
    k, n = te.reduce_axis((0, 64), "k"), te.reduce_axis((0, 64), "n")
    if row is None:
        c = te.compute((8, 8), lambda i, j: te.sum(x[i, k] * x[j, k], axis=k), name="c")
        return te.create_prim_func([x, te.compute((8, 8), lambda i, j: 2 * c[i, j], name="Y")])
    m = te.compute((8,), lambda i: te.max(x[i, k], axis=k), name="m")
    y = te.compute((8,), lambda i: te.sum(te.exp(x[i, n] - m[row(i)]), axis=n), name="Y")
    return te.create_prim_func([x, y])


def test_a_tensor_times_itself_is_a_cascade() -> None:
    """Rules of products keep tiles of two tensors."""
    assert is_cascade(read_source(of_one_tensor(None)))


def test_what_is_neither_chain_nor_cascade_says_why() -> None:
    with pytest.raises(ScheduleRefused) as caught:
        crossfuse.compile(of_one_tensor(lambda i: i // 2))
    assert str(caught.value) == (
        "compile: a given function: found neither a cascade of reductions (block 'Y', buffer 'm': "
        "a result read at another row: m[i0 // 2]) nor a chain of products (function 'main', "
        "block 'Y': an output that is not an elementwise function of one product); limit: "
        "reductions over one axis, or one or two products with elementwise blocks. Instead: split "
        "the function into such parts, or write the schedule with the primitives."
    )


def test_explain_derives() -> None:
    text = CliRunner().invoke(app, ["explain", "softmax:rows=64,cols=1024"])
    assert text.exit_code == 0, text.output
    assert "s' = s·exp(m - m~) + Σ exp(x - m~)" in text.output
    for words in ("Stream of threads: threads=", "bound by", "not fused", "do not fuse"):
        assert words in text.output
    out = CliRunner().invoke(app, ["explain", "R1", "--json"])
    found = json.loads(out.stdout)
    assert [each["name"] for each in found["slots"]] == ["m", "o", "s"]
    assert (found["plan"]["family"], found["plan"]["tiles"]["cluster"]) == ("tiles", 1)
    assert found["passes"][0]["name"] == "scores"


def test_explain_takes_the_options_of_chains(tmp_path: Path) -> None:
    def explained(*words: str) -> dict[str, Any]:
        out = CliRunner().invoke(app, ["explain", *words, "--json"])
        assert out.exit_code == 0, out.output
        return json.loads(out.stdout)

    found = explained("R3:batch=1", "--max-cluster", "4", "--top", "3")
    assert found["plan"]["tiles"]["cluster"] == 4
    assert len(found["best"]) == 2
    assert explained("R7", "--only", "eager")["plan"]["tiles"] == {}
    assert explained("R7", "--target", "nvidia-h200")["plan"]["device"] == "nvidia-h200"
    picture = tmp_path / "softmax.svg"
    explained("softmax:rows=64,cols=1024", "--svg", str(picture))
    assert "bound by" in picture.read_text()


def test_a_plan_of_a_cascade_is_one_of_its_own() -> None:
    found = crossfuse.plan("softmax:rows=64,cols=1024")
    assert (found.family, found.shape.name) == ("stream", "softmax:rows=64,cols=1024")
    assert crossfuse.plan(resolve("R9")).family == "rows"
    assert crossfuse.plan("G1:M=16").chain.extents["m"] == 16


@pytest.mark.parametrize(
    ("text", "picture"),
    [("softmax:rows=8,cols=512", "no clusters"), ("variance:rows=2,cols=1048576", "cluster of 16")],
)
def test_the_command_says_who_holds_what(text: str, picture: str, tmp_path: Path) -> None:
    out = CliRunner().invoke(app, ["compile", text, "-o", str(tmp_path), "--json"])
    assert out.exit_code == 0, out.output
    found = json.loads(out.stdout)
    assert picture in found["layout"]
    assert found["plan"]["family"] == "stream"
