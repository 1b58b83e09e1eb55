"""Candidates and records as JSON, whole and damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from crossfuse.bench.job import Job, Timing
from crossfuse.errors import WorkloadRefused
from crossfuse.meta_schedule.build import Build
from crossfuse.meta_schedule.candidate import Candidate, read_candidates
from crossfuse.meta_schedule.records import Record, append, fastest, read_records
from crossfuse.runtime.manifest import ResourceUsage

CHAIN = "gemm_chain:M=16,K=64,N=128,L=64"
GIVEN = {"spec": CHAIN, "family": "dsm", "tiles": {"cluster": 8, "rows": 64}}
USAGE = ResourceUsage("main", 168, 0, 0, 0, 0, 2)


def candidate(**changes) -> Candidate:
    return Candidate.from_json(GIVEN | changes, "a test")


def record(each: Candidate, time: float | None, status: str = "ok") -> Record:
    timing = Timing(status, "", time, time, 0.2, 0.2, 2, 16, 0.3, (USAGE,))
    return Record(each, Build("ok", "", 4.5), Job(each.spec, "ours"), timing, 1, "NVIDIA H100")


def test_a_candidate_survives_json() -> None:
    each = candidate()
    assert Candidate.from_json(json.loads(json.dumps(each.to_json())), "") == each
    assert each.summary == "dsm cluster=8 rows=64"


def test_the_order_of_fields_is_not_part_of_the_id() -> None:
    assert candidate().id == candidate(tiles={"rows": 64, "cluster": 8}).id
    assert candidate().id != candidate(tiles={"rows": 128, "cluster": 8}).id
    assert len(candidate().id) == 16


def test_notes_travel_and_are_no_part_of_the_id() -> None:
    noted = candidate(name="G1", grid=[[120, 4, 256, 226544]])
    assert noted == candidate()
    assert noted.id == candidate().id
    assert noted.to_json() == candidate().to_json() | {
        "name": "G1",
        "grid": [[120, 4, 256, 226544]],
    }


def test_packaged_ids_are_resolved() -> None:
    assert candidate(spec="S3:M=16").spec.startswith("gated_ffn:M=16,K=4096,N=11008")


def test_tiles_of_two_phases_in_words() -> None:
    tiles = {"first": {"rows": 128, "columns": 96}, "second": {"split": 4, "cluster": 0}}
    assert candidate(family="l2", tiles=tiles).summary == (
        "l2 first(rows=128, columns=96) second(split=4)"
    )


@pytest.mark.parametrize("lines", [False, True])
def test_a_file_of_candidates(tmp_path: Path, lines: bool) -> None:
    path = tmp_path / "candidates.json"
    values = [GIVEN, GIVEN | {"family": "registers", "tiles": {}}, GIVEN]
    path.write_text("\n".join(map(json.dumps, values)) if lines else json.dumps(values))
    assert [each.family for each in read_candidates(path)] == ["dsm", "registers"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1], "candidate 0: found 1; limit: an object."),
        ([GIVEN, {"spec": CHAIN}], "candidate 1: found"),
        ([GIVEN | {"color": "red"}], "color: unknown; limit: at most spec, family, tiles, trace"),
        ([GIVEN | {"family": "smem"}], "family 'smem'; limit: gemm, registers, dsm, l2, global"),
        ([GIVEN | {"spec": "gemm:M=0"}], "gemm"),
        ([GIVEN | {"family": "trace", "tiles": {}}], "a trace for family trace"),
        ([GIVEN | {"trace": [1]}], "a trace for family trace, and for no other"),
    ],
)
def test_what_is_no_candidate(tmp_path: Path, value: object, text: str) -> None:
    path = tmp_path / "candidates.json"
    path.write_text(json.dumps(value))
    with pytest.raises(WorkloadRefused) as caught:
        read_candidates(path)
    assert text in str(caught.value)


@pytest.mark.parametrize("text", ["[{", "", "{} and"])
def test_what_is_no_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "candidates.json"
    path.write_text(text)
    if text:
        with pytest.raises(WorkloadRefused, match="one candidate a line"):
            read_candidates(path)
    else:
        assert read_candidates(path) == ()


def test_a_record_survives_json() -> None:
    for each in (record(candidate(), 4.5), Record(candidate(), Build("refused", "no room"), JOB)):
        assert Record.from_json(json.loads(json.dumps(each.to_json()))) == each


JOB = Job(CHAIN, "ours")


def test_only_what_is_right_has_a_time() -> None:
    right, wrong = record(candidate(), 4.5), record(candidate(), 1.5, "wrong")
    unbuilt = Record(candidate(), Build("failed", "nvcc: no"), JOB)
    assert [each.microseconds for each in (right, wrong, unbuilt)] == [4.5, None, None]
    assert [each.check for each in (right, wrong, unbuilt)] == ["passed", "failed", "not run"]
    assert [each.status for each in (right, wrong, unbuilt)] == ["ok", "wrong", "build-failed"]
    assert unbuilt.message == "nvcc: no"


def test_fastest_of_each_workload() -> None:
    other = candidate(spec="gemm_chain:M=8,K=64,N=128,L=64")
    slow, quick = record(candidate(), 9.0), record(candidate(family="registers", tiles={}), 3.0)
    liar = record(candidate(family="l2", tiles={}), 1.0, "wrong")
    best = fastest([slow, quick, liar, record(other, 7.0)])
    assert best == {CHAIN + ",dtype=bfloat16,act=relu": quick, other.spec: record(other, 7.0)}


def test_damaged_lines_cost_themselves_alone(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first, second = record(candidate(), 4.5), record(candidate(tiles={}), 5.5)
    append(path, first)
    whole = path.read_text()
    # Cut off by a crash, a foreign line, a line whose id was changed, and no record at all.
    forged = json.loads(whole) | {"id": "0" * 16}
    path.write_text(f"{whole}[]\n{json.dumps(forged)}\n{whole[:100]}")
    append(path, second)
    found = read_records(path)
    assert found.records == (first, second)
    assert [text.partition(": ")[0].rpartition(" ")[2] for text in found.broken] == ["2", "3", "4"]
    assert "0000000000000000" in found.broken[1]


def test_the_last_record_of_a_candidate_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for time in (4.5, 3.5):
        append(path, record(candidate(), time))
    (found,) = read_records(path).records
    assert found.microseconds == 3.5
    assert read_records(tmp_path / "none").records == ()


def test_records_of_two_gpus_are_both_read(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ours = record(candidate(), 4.5)
    found = [ours, replace(ours, gpu="NVIDIA H200")]
    for each in found:
        append(path, each)
    assert list(read_records(path).records) == found
