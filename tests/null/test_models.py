"""Models as text, what they move at least, what the bench makes of them; nothing is compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from crossfuse.bench.job import Row  # noqa: E402
from crossfuse.bench.models import compile_models, summary  # noqa: E402
from crossfuse.bench.plan import plan, setting  # noqa: E402
from crossfuse.bench.table import report  # noqa: E402
from crossfuse.errors import RefusedError  # noqa: E402
from crossfuse.measure import timing  # noqa: E402
from crossfuse.measure.job import Job, Timing  # noqa: E402
from crossfuse.models import ModelSpec, build, cost, names_one, parse  # noqa: E402
from crossfuse.models.spec import MODELS  # noqa: E402
from null.test_bench_measure import answered, cuda  # noqa: E402, F401 -- a fixture

SMALL = "model:gpt2-small,layers=1,tokens=4,reduce=12"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rest", ["tokens=4", "layers=1,batch=2,tokens=8,dtype=float16,head=true"])
def test_text_is_read_back(name: str, rest: str) -> None:
    spec = parse(f"model:{name},{rest}")
    assert names_one(str(spec)) and parse(str(spec)) == spec
    assert spec.layers == (MODELS[name].layers if rest == "tokens=4" else 1)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("model:lama-3-8b", "found 'lama-3-8b'.*write 'llama-3-8b'"),
        ("model:bert-base,token=4", "found 'token'.*write 'tokens'"),
        ("model:bert-base,tokens=0", "tokens: found 0; limit: a positive integer"),
        ("model:bert-base,cache=4", "cache: found 4; limit: 0, since it has no cache"),
        (
            "model:bert-base,reduce=5",
            "reduce: found 5; limit: a divisor of heads.*heads, 12, are no",
        ),
        ("model:resnet-small,part=mlp", "part: found mlp; limit: whole"),
        ("model:bert-base,part=head", "found 'head'; limit: one of whole, mlp"),
        ("model:bert-base,head=yes", "found 'yes'; limit: one of true, false"),
    ],
)
def test_models_that_are_none_are_refused(text: str, refusal: str) -> None:
    with pytest.raises(RefusedError, match=refusal):
        parse(text)


def test_the_layers_of_llama_have_the_weights_of_its_paper() -> None:
    moved, flops = cost(parse("model:llama-3.2-1b,tokens=1,head=true"))
    # 1.236e9 parameters, whose embedding makes the logits too; all multiply one token.
    assert moved / 2 == pytest.approx(1.236e9, rel=0.001)
    assert flops == pytest.approx(2 * 1.236e9, rel=0.001)
    layer = cost(parse("model:llama-3-8b,layers=1,tokens=1"))[0] / 2
    assert layer == pytest.approx(218.1e6, rel=0.001)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_made_alike_and_float64_leaves_them_as_they_are(name: str) -> None:
    spec = ModelSpec(name, layers=1, tokens=4, reduce=4)
    one, same = build(spec), build(spec)
    with torch.no_grad():
        first = one.module(*one.inputs)
        exact = one.exact()
        assert torch.equal(one.module(*one.inputs), first)
        assert torch.equal(same.module(*same.inputs), first)
    assert exact.dtype == torch.float64 and first.dtype == torch.bfloat16
    assert (first.double() - exact).norm() < 0.05 * exact.norm()


def test_a_cache_is_what_earlier_tokens_left() -> None:
    """Tokens of a sequence with a cache of those before are the last of the whole sequence."""
    spec = parse("model:llama-3.2-1b,layers=1,tokens=6,reduce=8,dtype=float32")
    whole = build(spec)
    part = build(replace(spec, tokens=2, cache=4))
    x = whole.inputs[0]
    attention, norm = whole.module.layers[0].attention, whole.module.layers[0].attention_norm
    with torch.no_grad():
        y = norm(x)
        split = [
            each(y).view(1, 6, -1, 64).transpose(1, 2) for each in (attention.key, attention.value)
        ]
        key = whole.module.rotate(split[0])
        cached = part.module(x[:, 4:], key[:, :, :4], split[1][:, :, :4])
        torch.testing.assert_close(cached, whole.module(x)[:, 4:], rtol=1e-4, atol=1e-4)


def test_eager_is_planned_with_its_feed_forward_networks_alone() -> None:
    how = setting("ours,eager,compile-max", "cold", "graph", 15, 16)
    jobs = plan([SMALL], "1,16", how)
    assert [(each.label, each.rows, each.job.variant) for each in jobs[:4]] == [
        ("model:gpt2-small,layers=1,reduce=12", 1, "ours"),
        ("model:gpt2-small,layers=1,reduce=12", 1, "eager"),
        ("model:gpt2-small,layers=1,reduce=12,part=mlp", 1, "eager"),
        ("model:gpt2-small,layers=1,reduce=12", 1, "autotune"),
    ]
    assert len(jobs) == 8 and {each.job.calls for each in jobs} == {1}
    assert compile_models(jobs, workers=0, timeout=1) == 0


def test_the_summary_has_shares_kernels_and_means() -> None:
    how = setting("ours,eager,compile", "cold", "graph", 15, 16)
    times = {"ours": 80.0, "eager": 120.0, "compile": 90.0}
    rows = []
    for each in plan([SMALL], "", how):
        part = "part=mlp" in each.label
        note = "crossfuse_gemm_chain; first call 3.0 s"
        rows.append(Row(each, Timing("ok", note, 60.0 if part else times[each.job.variant])))
    lines = summary(rows)
    head = "model:gpt2-small,layers=1,tokens=4,reduce=12 (cold): "
    assert lines == [
        head + "feed-forward networks alone 60.0 of 120.0 us, 50%; at no time for them 2.00x over "
        "eager",
        head + "ours: crossfuse_gemm_chain; first call 3.0 s",
        "eager over ours: 1.500x (geometric mean of 1), least 1.500x",
        "compile over ours: 1.125x (geometric mean of 1), least 1.125x",
    ]
    assert lines[0] in [str(each) for each in report(rows)]


def test_a_model_is_checked_before_and_after_its_time(cuda: None) -> None:  # noqa: F811
    job = Job(SMALL, "eager", protocol="stream", repeats=3)
    found = answered(job)
    assert found.status == "ok" and found.microseconds == 1000
    assert found.worst_before is not None and found.worst_after is not None
    assert found.message.startswith("first call ")


def test_a_graph_that_computes_nothing_is_found_out(cuda: None) -> None:  # noqa: F811
    found = answered(Job(SMALL, "eager", repeats=3))
    assert found.status == "wrong" and "nan" in found.message


def test_what_no_graph_takes_is_launched_without_one(
    cuda: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(timing, "_captured", refuses)
    found = answered(Job(SMALL, "eager", repeats=3))
    assert found.status == "ok"
    assert found.message.endswith("; no CUDA graph: operation not permitted")


def test_variants_that_models_do_not_have_are_refused(
    cuda: None,  # noqa: F811
) -> None:
    found = answered(Job(SMALL, "unfused", repeats=3))
    assert found.status == "refused"
    assert found.message.startswith("bench: unfused: found model:gpt2")
    assert "variants of models: ours" in found.message
    found = answered(Job("gemm:M=4,K=32,N=64", "ours-eager"))
    assert found.status == "refused" and "limit: models. Instead: measure ours." in found.message
