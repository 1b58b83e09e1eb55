"""Variants and the measuring loop on torch's CPU, with clocks and graphs that are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from crossfuse.bench import variants, worker
from crossfuse.bench.cascades import CascadeProblem
from crossfuse.bench.job import OURS_EAGER, OWN, Variant
from crossfuse.bench.problem import make_problem
from crossfuse.errors import Refusal, WorkloadRefused
from crossfuse.measure import timing
from crossfuse.measure.job import Job, Request, Timing
from crossfuse.measure.timing import quietest
from crossfuse.workload import cascades, parse

torch = pytest.importorskip("torch")

SPECS = (
    "gated_ffn:M=8,K=64,N=96,L=32,act=silu",
    "gated_ffn:M=8,K=64,N=96,L=32,dtype=float16,act=gelu_tanh,weights=kn",
    "gemm_chain:M=4,K=32,N=64,L=16,act=relu",
    "gemm_chain:M=4,K=32,N=64,L=16,dtype=float32,weights=nk",
    "gemm:M=4,K=32,N=64",
    "gemm:M=4,K=32,N=64,act=max(x,0)*2",
    "gemm:M=4,K=32,N=64,act=relu,bias=last,residual=out",
    "gemm_chain:M=4,K=32,N=64,L=16,bias=first+last,scale=last,residual=out",
    "gated_ffn:M=8,K=64,N=96,L=32,bias=first,scale=first,residual=out",
    "gated_ffn:M=8,K=64,N=96,L=32,bias=first+last,weights=kn",
    "conv_chain:batch=2,H=5,W=7,IC=8,OC1=16,OC2=24,k1=3,act=gelu",
    "conv_chain:batch=1,H=4,W=3,IC=8,OC1=16,OC2=24,k1=1,dtype=float32,weights=kn",
    "conv_chain:batch=1,H=4,W=3,IC=8,OC1=16,OC2=24,k1=3,bias=first+last,scale=last,residual=in",
)
SMALL = SPECS[0]
EIGHT_BITS = "gemm:M=32,K=64,N=48,dtype=float8_e4m3fn"


class FakeEvent:
    """Reads a counter that every event advances by a millisecond."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = FakeEvent.now
        FakeEvent.now += 1.0

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


class FakeGraph:
    """A graph that does nothing when it is replayed, as a broken capture would."""

    replays = 0

    def replay(self) -> None:
        FakeGraph.replays += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def capture(graph: FakeGraph, pool: object) -> Iterator[None]:
        yield

    fake = SimpleNamespace(
        Event=FakeEvent,
        CUDAGraph=FakeGraph,
        graph=capture,
        graph_pool_handle=object,
        synchronize=lambda: None,
        is_available=lambda: False,
    )
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 4096)
    monkeypatch.setattr(timing, "COLD_BYTES", 200_000)


def answered(job: Job) -> Timing:
    """What the worker says of a job on the CPU."""
    return worker.Session("cpu").answer(Request(job))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["eager", "eager-apart"])
@pytest.mark.parametrize("l2", ["cold", "hot"])
def test_torch_variants_compute_the_workload(cuda: None, spec: str, name: str, l2: str) -> None:
    job = Job(spec, name, l2, "stream", repeats=4, calls=2)
    found = answered(job)
    assert found.status == "ok"
    assert found.worst_before is not None
    assert found.worst_before == found.worst_after <= 1
    # The stand-in clock says 1 ms between two events, whatever lies between them.
    assert found.microseconds == found.minimum == 1000 / found.calls
    assert found.calls == 2
    assert (found.copies == 1) == (l2 == "hot")


@pytest.mark.parametrize(
    "rest",
    [
        "weights=nk,out=bfloat16",
        "weights=kn,out=float16",
        "weights=nk,out=float16,act=relu",
        "weights=nk,out=bfloat16,scale=last,bias=last,residual=out",
        "weights=nk,out=float16,bias=last,residual=in",
    ],
)
@pytest.mark.parametrize("name", ["scaled-mm", "scaled-mm-fast"])
def test_products_of_8_bit_floats_are_right(cuda: None, rest: str, name: str) -> None:
    job = Job(f"{EIGHT_BITS},{rest}", name, protocol="stream", repeats=2, calls=2)
    found = answered(job)
    assert found.status == "ok", found.message
    assert found.worst_before is not None
    assert found.worst_before == found.worst_after <= 1
    scales = "the workload" if "scale" in rest else "one"
    assert found.message.startswith(f"torch._scaled_mm, scales of {scales}, ")


def test_wrong_product_of_8_bit_floats_is_found_out(
    cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **options: real(*a, **options) * 1.25)
    job = Job(f"{EIGHT_BITS},out=bfloat16", "scaled-mm", protocol="stream")
    assert answered(job).status == "wrong"


def test_every_set_of_weights_is_used_in_turn(cuda: None) -> None:
    used: list[int] = []
    bound = [lambda index=index: used.append(index) for index in range(6)]
    job = Job(SMALL, "eager", "cold", "stream", repeats=1, calls=2)
    timed = timing.steps(job.how, bound)
    timing.measure(job.how, timed, "cpu")
    assert used == [0, 1, 2, 3, 4, 5, 0, 1]


def test_hot_runs_the_same_set_before_the_clock_starts(cuda: None) -> None:
    used: list[int] = []
    job = Job(SMALL, "eager", "hot", "stream", repeats=1, calls=2)
    timing.measure(job.how, timing.steps(job.how, [lambda: used.append(0)]), "cpu")
    assert len(used) == (timing.WARMUPS + 1) * (timing.HEATING_CALLS + 2)


def test_only_graphs_that_are_replayed_are_captured(cuda: None) -> None:
    job = Job(SMALL, "eager", "cold", "graph", repeats=2, calls=1)
    timed = timing.steps(job.how, [lambda: None] * 100)
    assert len(timed) == timing.WARMUPS + 2


def test_graph_that_computes_nothing_is_found_out(cuda: None) -> None:
    before = FakeGraph.replays
    found = answered(Job(SMALL, "eager", repeats=2, calls=2))
    assert FakeGraph.replays > before
    assert found.status == "wrong"
    assert found.worst_before is not None
    assert found.worst_after is None
    assert "nan" in found.message
    assert found.microseconds is not None  # a baseline keeps its time


@pytest.mark.parametrize("name", [each for each in OWN if each != OURS_EAGER])
def test_wrong_kernel_of_ours_gets_no_time(
    cuda: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain = variants.eager(parse(SMALL), together=False)
    wrong = Variant(lambda a, *w: plain.call(a, *w) * 1.5, pack=plain.pack)
    monkeypatch.setattr(variants, "fused", lambda name, spec, device: wrong)
    monkeypatch.setattr(worker, "_compile", lambda job: None)
    found = answered(Job(SMALL, name, protocol="stream"))
    assert found.status == "wrong"
    assert found.microseconds is None
    assert "element-error" in found.message


@pytest.mark.parametrize(("calls", "copies"), [(5, 4), (2, 4), (5, 1)])
def test_a_kernel_that_goes_wrong_while_it_is_timed_gets_no_time(
    cuda: None, calls: int, copies: int
) -> None:
    """Also where the last call is of the first set, and into the same buffer."""
    spec = cascades.resolve("softmax:rows=32,cols=512,dtype=bfloat16")
    result = torch.empty(32, 512, dtype=torch.bfloat16)
    made = 0

    def call(x: torch.Tensor) -> torch.Tensor:
        nonlocal made
        made += 1
        return result.copy_(torch.softmax(x, -1) if made <= copies else x)

    l2 = "hot" if copies == 1 else "cold"
    job = Job(str(spec), "ours", l2, "stream", repeats=1, calls=calls)
    found = worker.measure_variant(Variant(call), CascadeProblem(spec), job.how, "cpu", own=True)
    assert (found.status, found.copies) == ("wrong", copies)
    assert found.worst_before is not None and found.worst_before <= 1
    assert found.worst_after is None and found.microseconds is None


def test_limits_are_kept_between_the_variants_of_a_workload(tmp_path: Path) -> None:
    spec = parse(SMALL)
    fresh = make_problem(spec, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    again, none = make_problem(spec, tmp_path), make_problem(spec)
    for each in (again, none):
        assert (each.limits.reference == fresh.limits.reference).all()
        assert (each.limits.absolute == fresh.limits.absolute).all()
        assert each.limits.unfused.dtype == fresh.limits.unfused.dtype
        assert each.limits.unfused.tobytes() == fresh.limits.unfused.tobytes()
        assert each.limits.norm == fresh.limits.norm


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("eager", "gemm:M=4,K=32,N=64,combine=max"),
        ("compile", "gemm:M=4,K=32,N=64,out=float32"),
        ("autotune", "gemm:M=4,K=32,N=64,dtype=float8_e4m3fn"),
        ("unfused", "gemm:M=4,K=32,N=64"),
        ("unfused", "conv_chain:batch=1,H=4,W=3,IC=8,OC1=16,OC2=24,k1=3"),
        ("scaled-mm", "gemm:M=4,K=32,N=64"),
        ("scaled-mm", "gemm:M=4,K=32,N=64,dtype=float8_e4m3fn"),
        ("scaled-mm", "gemm:M=4,K=32,N=64,dtype=float8_e5m2,out=bfloat16"),
        ("scaled-mm", "gemm:M=4,K=40,N=64,dtype=float8_e4m3fn,out=bfloat16"),
        ("scaled-mm", "gemm:M=4,K=32,N=64,dtype=float8_e4m3fn,out=bfloat16,combine=max"),
        ("scaled-mm-fast", "gemm_chain:M=4,K=32,N=64,L=32,dtype=float8_e4m3fn,out=bfloat16"),
        ("ours-l2", "gemm:M=4,K=32,N=64"),
    ],
)
def test_baselines_that_do_not_exist_are_refused(name: str, spec: str) -> None:
    with pytest.raises(WorkloadRefused):
        variants.make(name, parse(spec))


def test_refusal_of_a_kernel_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal("compile", "here", "17", "16", "take 16")

    def refuses(*arguments: object) -> None:
        raise WorkloadRefused(refusal)

    monkeypatch.setattr(worker, "_compile", refuses)
    found = worker.Session("cpu").answer(Request(Job(SMALL, "ours")))
    assert (found.status, found.message) == ("refused", str(refusal))


def test_compiled_variants_wrap_the_concatenated_form(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: seen.append(options) or call)
    for name in ("compile", "autotune"):
        made = variants.make(name, parse(SMALL))
        gate = torch.zeros(96, 64)
        both, _ = made.pack({"B_gate": gate, "B_up": gate, "D": torch.zeros(32, 96)})
        assert both.shape == (192, 64)
    assert [each["mode"] for each in seen] == [None, "max-autotune-no-cudagraphs"]


@pytest.mark.parametrize(
    ("rounds", "chosen"),
    [
        ([[5.0, 5.1, 5.2]], 0),
        # Half of the first were disturbed; the second were not.
        ([[5.0, 9.0, 20.0], [5.2, 5.2, 5.3]], 1),
        # Calm, but far above what it can do.
        ([[5.0, 9.0, 20.0], [9.0, 9.0, 9.1], [5.2, 5.2, 5.3]], 2),
        ([[5.0, 9.0, 20.0], [5.0, 8.0, 9.0], [5.0, 8.5, 9.0]], 1),
    ],
)
def test_disturbed_times_are_taken_again(rounds: list[list[float]], chosen: int) -> None:
    given = iter(rounds)
    assert quietest(lambda: next(given)) == rounds[chosen]
    assert next(given, None) is None
