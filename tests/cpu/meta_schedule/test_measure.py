"""Candidates built with nvcc and measured by the real process, but for the GPU."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from crossfuse.measure.job import LIBRARY, Job, Request, Timing, Way
from crossfuse.measure.timer import Measurer
from crossfuse.meta_schedule.build import Conditions, build_candidate, shared_object
from crossfuse.meta_schedule.candidate import Candidate, candidate_of, schedule_candidate
from crossfuse.meta_schedule.records import (
    FAILED_SECONDS,
    Record,
    commit,
    open_database,
    read_records,
    workload_module,
)
from crossfuse.meta_schedule.tune import make_bundle, measure_bundle, open_bundle
from crossfuse.runtime import load

pytest.importorskip("torch")

SPEC = "gemm_chain:M=16,K=64,N=256,L=64"
FULL = f"{SPEC},dtype=bfloat16,act=relu"
STAND_IN = (sys.executable, str(Path(__file__).parent / "stand_in.py"))
HOW = Conditions(job=Job("", "ours", calls=2), timeout=120.0, builders=2, measurer=STAND_IN)
WAYS = {
    "registers": {"parts": 4},
    "dsm": {"cluster": 4},
    "l2": {"first": {"rows": 64}, "second": {}},
    "global": {},
}


def candidate(family: str, **rest) -> Candidate:
    return Candidate.from_json({"spec": SPEC, "family": family, **rest}, "a test")


@pytest.mark.slow
@pytest.mark.parametrize("family", WAYS)
def test_a_candidate_of_each_family_compiles(tmp_path: Path, family: str) -> None:
    each = candidate(family, tiles=WAYS[family])
    built = build_candidate(each, tmp_path, "nvidia-h100", 300)
    assert built.status == "ok", built.message
    kernel = load(shared_object(tmp_path, each), check_device=False)
    assert kernel.manifest.metadata["candidate"] == each.to_json()
    # It is found the next time.
    assert build_candidate(each, tmp_path, "nvidia-h100", 0.001).status == "ok"


def test_a_recorded_schedule_is_a_candidate_too() -> None:
    from crossfuse.hardware import device
    from crossfuse.lower.extract import lower

    target = device("nvidia-h100")
    first = schedule_candidate(candidate("registers", tiles={"parts": 4}), target)
    value = json.loads(json.dumps(candidate_of(FULL, first).to_json()))
    again = schedule_candidate(Candidate.from_json(value, "a test"), target)
    assert lower(again).image == lower(first).image


@pytest.mark.parametrize(
    ("given", "status", "text"),
    [
        (
            {"family": "dsm", "tiles": {"parts": 4, "colour": 1}},
            "refused",
            "found colour: unknown; limit: at most r",
        ),
        (
            {"family": "l2", "tiles": {"third": {}}},
            "refused",
            "found third: unknown; limit: at most first",
        ),
        ({"family": "registers", "tiles": {"parts": 31}}, "refused", "register-tiles"),
        ({"family": "trace", "trace": [["Nonsense"]]}, "failed", ""),
    ],
)
def test_what_does_not_compile_is_kept_as_text(
    tmp_path: Path, given: dict, status: str, text: str
) -> None:
    built = build_candidate(candidate(**given), tmp_path, "nvidia-h100", 300)
    assert (built.status, text in built.message) == (status, True), built.message


def test_a_compiler_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    other = candidate("registers", tiles={"parts": 2, "columns": 32})
    built = build_candidate(other, tmp_path, "nvidia-h100", 0.05)
    assert built.status == "refused"
    assert "no cubin after 0.05 s" in built.message


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory):
    """A bundle that was built and measured, and its records by family."""
    folder = tmp_path_factory.mktemp("measured") / "bundle"
    wanted = [candidate(family, tiles=tiles) for family, tiles in WAYS.items()]
    wanted += [candidate("eager"), candidate("dsm", tiles={"cluster": 4, "parts": 13})]
    make_bundle(wanted, folder, HOW, build_there=True)
    found = open_bundle(folder)
    measure_bundle(found, HOW)
    return found


@pytest.mark.slow
def test_a_bundle_comes_back_with_checked_times(bundle) -> None:
    records = read_records(bundle.results).records
    assert len(records) == 6
    *right, refused = sorted(records, key=lambda each: each.status == "build-refused")
    assert {each.status for each in right} == {"ok"}
    assert refused.status == "build-refused"
    for each in right:
        assert each.microseconds == 7.5
        assert each.timing is not None
        assert each.timing.worst_before is not None
        assert each.timing.worst_before == each.timing.worst_after <= 1


def test_the_database_replays_what_was_measured(bundle, tmp_path: Path) -> None:
    from crossfuse.hardware import tvm_target
    from crossfuse.lower.extract import lower

    records = [each for each in read_records(bundle.results).records if each.status == "ok"]
    chosen = next(each for each in records if each.candidate.family == "dsm")
    assert commit(open_database(tmp_path), [chosen], "nvidia-h100") == 1
    database = open_database(tmp_path)
    module = workload_module(FULL)
    replayed = database.query_schedule(module, tvm_target("nvidia-h100"), "main")
    manifest = load(shared_object(bundle.folder, chosen.candidate), check_device=False).manifest
    assert lower(replayed).image.launches == manifest.launches
    (record,) = database.get_top_k(database.commit_workload(module), 3)
    assert [float(each) for each in record.run_secs] == pytest.approx([7.5e-6])


def test_the_database_has_no_time_of_what_broke(bundle, tmp_path: Path) -> None:
    records = read_records(bundle.results).records
    (first, *_) = (each for each in records if each.candidate.family == "l2")
    hung = Record(first.candidate, first.build, first.job, Timing("timeout", "no answer in 2 s"))
    (refused,) = (each for each in records if each.status == "build-refused")
    eager = next(each for each in records if each.candidate.family == "eager")
    database = open_database(tmp_path)
    assert commit(database, [hung, refused, eager], "nvidia-h100") == 1
    (record,) = database.get_all_tuning_records()
    assert [float(each) for each in record.run_secs] == [FAILED_SECONDS]
    assert not database.get_top_k(database.commit_workload(workload_module(FULL)), 3)


@pytest.mark.slow
def test_moods_of_a_kernel(bundle, tmp_path: Path) -> None:
    """The process as it is, with kernels that hang, die and err."""
    built = shared_object(bundle.folder, candidate("registers", tiles=WAYS["registers"]))
    for mood in ("right", "wrong", "die", "hang"):
        for suffix in (".so", ".json"):
            shutil.copy(built.with_suffix(suffix), tmp_path / f"{mood}-kernel{suffix}")
    measurer = Measurer(STAND_IN)
    requests = {
        mood: Request(
            Job(FULL, "ours", calls=2),
            Way(LIBRARY, str(tmp_path / f"{mood}-kernel.so")),
            str(tmp_path),
        )
        for mood in ("right", "wrong", "die", "hang")
    }
    try:
        measurer.prepare(requests["right"])
        found = {mood: measurer.measure(each, 6.0) for mood, each in requests.items()}
        again, _ = measurer.measure(requests["right"], 6.0)
    finally:
        measurer.close()
    assert {mood: timing.status for mood, (timing, _) in found.items()} == {
        "right": "ok",
        "wrong": "wrong",
        "die": "crashed",
        "hang": "timeout",
    }
    assert "element-error" in found["wrong"][0].message
    assert found["wrong"][0].microseconds is None
    assert [attempts for _, attempts in found.values()] == [1, 2, 1, 1]
    assert again.status == "ok"
