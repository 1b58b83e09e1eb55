"""Floors, jobs as values, selection of workloads, rotation of weights."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from crossfuse.bench.job import VARIANTS, Job, Planned, Row, Timing, floor, weight_bytes
from crossfuse.bench.plan import Setting, plan, select, setting
from crossfuse.errors import WorkloadRefused
from crossfuse.measure.timing import COLD_BYTES, MOST_COPIES, copies_needed, groups
from crossfuse.runtime.manifest import ResourceUsage
from crossfuse.schema import typed
from crossfuse.workload import lookup, parse

# (id, M, floor) of shared/data/h100_baselines.json: memory-bound and compute-bound ones.
PUBLISHED = [
    ("G1", 1, 0.1),
    ("G1", 512, 0.2),
    ("G2", 128, 0.15),
    ("G4", 512, 6.12),
    ("G5", 1, 89.48),
    ("G5", 512, 173.97),
    ("S1", 128, 50.86),
    ("S3", 16, 90.26),
    ("S3", 512, 175.33),
    ("S8", 256, 6.64),
    ("S8", 512, 12.23),
]


@pytest.mark.parametrize(("name", "rows", "published"), PUBLISHED)
def test_floor_is_the_published_one(name: str, rows: int, published: float) -> None:
    assert round(floor(lookup(name, M=rows)).microseconds, 2) == published


def test_floor_counts_bytes_of_each_type() -> None:
    least = floor(parse("gemm:M=2,K=3,N=5,dtype=float8_e4m3fn,out=float32"))
    assert least.bytes == 2 * 3 + 3 * 5 + 4 * 2 * 5
    assert least.flops == 2 * 2 * 3 * 5
    assert least.microseconds == least.memory_microseconds > least.compute_microseconds


def test_floor_counts_what_epilogues_read() -> None:
    least = floor(parse("gemm:M=2,K=3,N=5,dtype=e4m3,out=f16,bias=last,scale=last,residual=out"))
    assert least.bytes == 2 * 3 + 3 * 5 + 2 * 5 + 4 + 2 * 2 * 5 + 2 * 2 * 5


def test_floor_of_8_bit_floats_has_twice_the_roof() -> None:
    wide = floor(parse("gemm:M=4096,K=4096,N=4096"))
    narrow = floor(parse("gemm:M=4096,K=4096,N=4096,dtype=float8_e4m3fn,out=bfloat16"))
    assert round(narrow.compute_microseconds, 2) == 86.99
    assert wide.compute_microseconds == 2 * narrow.compute_microseconds
    assert narrow.microseconds == narrow.compute_microseconds


def test_weight_bytes_leave_activations_out() -> None:
    assert weight_bytes(lookup("S3")) == 3 * 4096 * 11008 * 2


def test_values_survive_json() -> None:
    job = Job(str(lookup("S8")), "ours", "hot", "stream", 7, 3)
    usage = ResourceUsage("main_0", 168, 0, 0, 0, 0, 2, ("C7510",))
    timing = Timing("ok", "note", 12.5, 12.0, 0.25, 0.25, 4, 3, 1.5, (usage,))
    assert typed(Job, json.loads(json.dumps(asdict(job)))) == job
    assert typed(Timing, json.loads(json.dumps(asdict(timing)))) == timing
    row = Row(Planned("S8", 128, 5.0, job), timing)
    assert row.to_json()["time_over_floor"] == 2.5
    assert row.to_json()["job"]["variant"] == "ours"


def test_only_answers_are_no_faults() -> None:
    assert not Timing("ok").fault
    assert not Timing("refused").fault
    assert all(Timing(each).fault for each in ("wrong", "failed", "crashed", "timeout"))


def test_suite_names_stand_for_all_their_workloads() -> None:
    found = select(["gated_ffn", "G1"], [1, 16])
    assert [label for label, _ in found] == [f"S{i}" for i in range(1, 9) for _ in range(2)] + [
        "G1",
        "G1",
    ]
    assert {spec.M for _, spec in found} == {1, 16}


def test_rows_of_the_workload_stay_where_none_are_given() -> None:
    assert [spec.M for _, spec in select(["S3", "S3:M=7"], [])] == [128, 7]


def test_labels_leave_the_rows_out() -> None:
    texts = ["S3:M=7,dtype=float16", "gemm:M=8,K=16,N=32,dtype=bfloat16"]
    assert [label for label, _ in select(texts, [])] == ["S3:dtype=float16", "gemm:K=16,N=32"]


def test_plan_is_every_combination_once() -> None:
    how = setting("ours,eager", "cold,hot", "graph,stream", 5, 4)
    jobs = plan(["S8", "S8:M=128"], "", how)
    assert len(jobs) == len({each.job for each in jobs}) == 8
    assert {each.label for each in jobs} == {"S8"}
    assert jobs[0].job == Job(str(lookup("S8")), "ours", "cold", "graph", 5, 4)


def test_rows_replace_those_of_the_workload() -> None:
    jobs = plan(["gemm:M=8,K=16,N=32"], "1, 64", Setting(tuple(VARIANTS)))
    assert [each.rows for each in jobs] == [1] * len(VARIANTS) + [64] * len(VARIANTS)


@pytest.mark.parametrize(
    ("workloads", "rows", "advice"),
    [
        (["S3"], "0", "write M=128"),
        (["S3"], "1,two", "write --m 1,16,64,128"),
        (["S33"], "", "write 'S3'"),
        (["R15"], "", "write 'R5'"),
        (["C1"], "16", "change batch, H, W and k1"),
    ],
)
def test_what_is_no_workload_is_refused(workloads: list[str], rows: str, advice: str) -> None:
    with pytest.raises(WorkloadRefused) as caught:
        plan(workloads, rows, Setting(("ours",)))
    assert advice in caught.value.refusal.instead


@pytest.mark.parametrize(
    ("options", "where", "advice"),
    [
        (("our", "cold", "graph"), "--variants", "write 'ours'"),
        (("ours", "warm", "graph"), "--l2", "choose some of these"),
        (("ours", "cold", "graphs"), "--protocol", "write 'graph'"),
        (("", "cold", "graph"), "--variants", "choose some of these"),
    ],
)
def test_unknown_names_are_refused(options: tuple[str, ...], where: str, advice: str) -> None:
    with pytest.raises(WorkloadRefused) as caught:
        setting(*options, 15, 16)
    assert (caught.value.refusal.where, caught.value.refusal.instead) == (where, advice)


@pytest.mark.parametrize("name", ["G1", "G4", "S8", "S3"])
@pytest.mark.parametrize("calls", [1, 16])
def test_cold_sets_exceed_the_cache_and_come_in_turn(name: str, calls: int) -> None:
    size = weight_bytes(lookup(name))
    copies = copies_needed(size, calls, "cold")
    used = groups(copies, calls, "cold")
    assert copies == MOST_COPIES or copies * size > COLD_BYTES
    assert all(len(group) == calls for group in used)
    if copies < calls:
        # A set comes again once all others, which the cache does not hold, have been used.
        assert used == (tuple(number % copies for number in range(calls)),)
    else:
        assert sorted(index for group in used for index in group) == list(range(copies))


def test_fewer_cold_sets_than_calls() -> None:
    assert copies_needed(COLD_BYTES // 2, 7, "cold") == 3
    assert groups(3, 7, "cold") == ((0, 1, 2, 0, 1, 2, 0),)


def test_hot_is_one_set() -> None:
    assert copies_needed(10, 16, "hot") == 1
    assert groups(1, 3, "hot") == ((0, 0, 0),)


def test_tiny_weights_are_not_copied_without_end() -> None:
    assert copies_needed(2, 16, "cold") == MOST_COPIES
    assert len(groups(MOST_COPIES, 16, "cold")) == MOST_COPIES // 16


def test_a_workload_has_the_baselines_that_it_can_have() -> None:
    how = setting(None, "cold", "graph", 15, 16)
    workloads = ("S3", "G4", "softmax:rows=4,cols=64", "model:llama-3.2-1b,layers=2,tokens=16")
    jobs = (plan([one], "", how) for one in workloads)
    found = [tuple(dict.fromkeys(each.job.variant for each in one)) for one in jobs]
    usual = ("ours", "eager", "compile", "autotune")
    assert found == [("ours", "eager", "eager-apart", "compile", "autotune"), *(usual,) * 3]
