"""Cascades are tuned as chains are: candidates, bundles, checked records, a database to replay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import crossfuse
from cpu.meta_schedule.test_measure import STAND_IN
from crossfuse.cli import app
from crossfuse.errors import ArtefactRefused, RefusedError, ScheduleRefused, WorkloadRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.measure.job import LIBRARY, Job, Request, Timing, Way
from crossfuse.measure.timer import Measurer
from crossfuse.meta_schedule.build import Build, Conditions, build_candidate, shared_object
from crossfuse.meta_schedule.candidate import Candidate, best_candidates, schedule_candidate
from crossfuse.meta_schedule.records import Record, append, commit, open_database, read_records
from crossfuse.meta_schedule.tune import make_bundle, measure_bundle, open_bundle
from crossfuse.planner.plan import plan
from crossfuse.workload.cascades import resolve

pytest.importorskip("torch")

H100 = device("nvidia-h100")
SOFTMAX = "softmax:rows=8,cols=512,dtype=float32"
NORM_GEMM = "rmsnorm_gemm:tokens=20,K=136,N=40"
ATTENTION = "attention:batch=1,heads=2,q_len=64,kv_len=96,head_dim=64"
HOW = Conditions(job=Job("", "ours", "hot", calls=1), timeout=120.0, measurer=STAND_IN)


def record(each: Candidate, time: float, status: str = "ok") -> Record:
    timing = Timing(status, "", time, time, 0.2, 0.2)
    return Record(each, Build("ok"), Job(each.spec, "ours"), timing)


def wanted(text: str, count: int) -> list[Candidate]:
    return best_candidates(resolve(text), "nvidia-h100", count)


@pytest.mark.parametrize("text", [SOFTMAX, ATTENTION])
def test_a_candidate_travels_and_lowers(text: str) -> None:
    for each in wanted(text, 2):
        again = Candidate.from_json(json.loads(json.dumps(each.to_json())), "a test")
        assert (again, again.id) == (each, each.id)
        image = lower(schedule_candidate(again, H100), H100).image
        assert image.launches[0].cluster_size == each.tiles["cluster"]


@pytest.mark.parametrize(
    ("spec", "family", "text"),
    [
        (
            SOFTMAX,
            "dsm",
            "found family dsm; limit: stream, tiles, warps, rows, rows_chain, attention_out, "
            "row_sums, eager of a cascade.",
        ),
        (
            "S3",
            "stream",
            "found family stream; limit: gemm, registers, dsm, l2, global, phases, launches, "
            "skinny, trace",
        ),
    ],
)
def test_families_are_those_of_the_workload(spec: str, family: str, text: str) -> None:
    with pytest.raises(WorkloadRefused) as caught:
        Candidate.from_json({"spec": spec, "family": family}, "a test")
    assert text in str(caught.value)


def test_tiles_that_there_are_not(tmp_path: Path) -> None:
    odd = Candidate(SOFTMAX, "stream", {"elements": 64})
    built = build_candidate(odd, tmp_path, "nvidia-h100", 300)
    assert built.status == "refused"
    found = "family 'stream': found elements: unknown; limit: at most threads"
    assert found in built.message
    with pytest.raises(RefusedError, match="a cascade without products"):
        schedule_candidate(Candidate(SOFTMAX, "tiles", {}), H100)


@pytest.mark.slow
def test_a_bundle_comes_back_with_checked_times(tmp_path: Path) -> None:
    each = [*wanted(SOFTMAX, 2), Candidate(str(resolve(SOFTMAX)), "eager")]
    make_bundle(each, tmp_path, HOW, build_there=True)
    found = open_bundle(tmp_path)
    measure_bundle(found, HOW)
    records = read_records(found.results).records
    assert [record.status for record in records] == ["ok"] * 3, [e.message for e in records]
    assert {record.candidate.family for record in records} == {"stream", "eager"}
    for one in records:
        assert one.microseconds == 7.5
        assert one.timing is not None and one.timing.worst_after is not None
        assert one.timing.worst_after <= 1


@pytest.mark.slow
def test_a_wrong_kernel_has_no_time(tmp_path: Path) -> None:
    (each,) = wanted(SOFTMAX, 1)
    assert build_candidate(each, tmp_path, "nvidia-h100", 300).status == "ok"
    library = shared_object(tmp_path, each)
    wrong = library.with_name(f"wrong-{library.name}")
    for suffix in (".so", ".json"):
        library.with_suffix(suffix).rename(wrong.with_suffix(suffix))
    job = replace(HOW.job, spec=each.spec)
    measurer, request = Measurer(STAND_IN), Request(job, Way(LIBRARY, str(wrong)), str(tmp_path))
    try:
        measurer.prepare(request)
        timing, _ = measurer.measure(request, HOW.timeout)
    finally:
        measurer.close()
    assert (timing.status, timing.microseconds) == ("wrong", None)


@pytest.mark.parametrize("text", [SOFTMAX, ATTENTION, NORM_GEMM])
def test_the_fastest_record_is_compiled_again(text: str, tmp_path: Path) -> None:
    first, second = wanted(text, 2)
    found = [record(first, 9.0), record(second, 5.0), record(first, 1.0, "wrong")]
    assert commit(open_database(tmp_path), found, "nvidia-h100") == 3
    again = crossfuse.compile(text, database=tmp_path)
    said = again.artefact.manifest.metadata["recorded"]
    assert (said["family"], said["tiles"]) == (second.family, dict(second.tiles))
    assert said["microseconds"] == pytest.approx(5.0)
    assert again.lowered.image == lower(schedule_candidate(second, H100), H100).image


def test_what_nobody_measured_is_not_in_the_database(tmp_path: Path) -> None:
    (each,) = wanted(SOFTMAX, 1)
    commit(open_database(tmp_path), [record(each, 9.0, "crashed")], "nvidia-h100")
    for text in (SOFTMAX, "softmax:rows=4,cols=512"):
        with pytest.raises(ArtefactRefused) as caught:
            crossfuse.compile(text, database=tmp_path)
        assert str(caught.value) == (
            f"database: {tmp_path}: found no kernel of it that was right: {resolve(text)}; limit: "
            "a record with a time, of this workload and target. Instead: tune it there (crossfuse "
            "tune --work-dir), or leave the database out."
        )


def test_the_command_goes_on_with_what_came_back(tmp_path: Path) -> None:
    words = ["tune", SOFTMAX, "--work-dir", str(tmp_path), "--json"]
    out = CliRunner().invoke(app, [*words, "--trials", "3", "--runner", "bundle"])
    assert out.exit_code == 0, out.output
    best = json.loads(out.stdout)["best"]
    assert (best["family"], best["measured"]) == ("stream", False)
    bundle = open_bundle(tmp_path / "bundle")
    for place, each in enumerate(bundle.candidates):
        append(bundle.results, record(each, 9.0 - place))
    out = CliRunner().invoke(app, [*words, "--trials", "0"])
    assert out.exit_code == 0, out.output
    found = json.loads(out.stdout)
    assert (found["records"], found["best"]["microseconds"]) == (3, 7.0)
    assert found["best"]["tiles"] == dict(bundle.candidates[-1].tiles)
    assert crossfuse.compile(SOFTMAX, database=tmp_path).lowered.image.launches


def test_servers_are_for_chains(tmp_path: Path) -> None:
    words = ["tune", SOFTMAX, "--work-dir", str(tmp_path), "--rpc", "box:9190:h100"]
    out = CliRunner().invoke(app, words)
    assert out.exit_code != 0
    assert "a cascade of reductions" in out.output.replace("\n", " ")


def test_workloads_become_a_bundle(tmp_path: Path) -> None:
    words = ["bundle", "make", SOFTMAX, ATTENTION, "--keep", "2", "--baseline", "--build-there"]
    out = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert out.exit_code == 0, out.output
    families = [each.family for each in open_bundle(tmp_path).candidates]
    assert families == ["stream", "stream", "eager", "tiles", "tiles", "eager"]


def test_a_plan_is_compiled_as_it_is() -> None:
    given = plan(SOFTMAX)
    tiles = {**given.tiles, "threads": 64, "rows": 1}
    compiled = crossfuse.compile(SOFTMAX, plan=replace(given, tiles=tiles))
    assert compiled.artefact.manifest.metadata["stream"] == tiles
    assert compiled.plan is not None and compiled.plan.tiles == tiles


def test_plans_of_something_else_are_refused() -> None:
    cases = [
        (SOFTMAX, plan("softmax:rows=4,cols=512"), "found a plan of softmax:rows=4,cols=512 for"),
        (SOFTMAX, plan("G1:M=16"), "found a plan of a chain for softmax"),
        ("G1:M=16", plan(SOFTMAX), "found a plan of softmax:rows=8,cols=512,dtype=float32 for"),
    ]
    for text, given, words in cases:
        with pytest.raises(ScheduleRefused, match=words):
            crossfuse.compile(text, plan=given)
    with pytest.raises(ScheduleRefused) as caught:
        crossfuse.compile(SOFTMAX, plan=plan(SOFTMAX, only=("eager",)))
    assert str(caught.value) == (
        "plan: family 'eager': found a plan that leaves the cascade to separate kernels; limit: "
        "stream, tiles, warps, rows, rows_chain, attention_out, row_sums. Instead: plan with "
        "only=('stream', 'tiles', 'warps', 'rows', 'rows_chain', 'attention_out', 'row_sums')."
    )
