"""What kernels with DSM are worth: spaces by tiles, means over made-up results, the program."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from crossfuse.errors import ArtefactRefused, PlanRefused
from crossfuse.hardware import device
from crossfuse.meta_schedule.candidate import Candidate, kernels_of, read_candidates
from crossfuse.workload.suites import name_of, resolve
from null.script import SCRIPTS, load
from study import subcommands
from study.compare_spaces import compare, kernels, mean, read_measured, summary
from study.spaces import SPACES, points_of, spaces_of

script = load("ablate_dsm")
MEASURED = SCRIPTS.parent / "benchmarks" / "results" / "candidates-h100.jsonl"
SPEC = str(resolve("G4:M=128"))
ONE = {"rows": 64, "columns": 64, "cluster": 1, "split": 1}
FIRST = {**ONE, "across": 1, "stacked": False}


def tiled(cluster: int = 1, across: int = 1, split: int = 1, split2: int = 1) -> dict[str, Any]:
    first = {**FIRST, "cluster": cluster, "across": across, "split": split}
    return {"first": first, "second": {**ONE, "cluster": cluster, "split": split2}}


@pytest.mark.parametrize(
    ("family", "tiles", "count"),
    [
        ("registers", {"rows": 64, "columns": 64, "parts": 8, "cluster": 8}, 1),
        # Parts that are summed through L2.
        ("registers", {"rows": 64, "columns": 64, "parts": 8, "cluster": 1}, 3),
        ("dsm", {"rows": 64, "cluster": 4, "parts": 2}, 1),
        ("dsm", {"rows": 64, "cluster": 1, "parts": 2}, 3),
        ("l2", tiled(), 3),
        ("l2", tiled(cluster=2), 2),
        ("l2", tiled(across=2), 2),
        ("l2", tiled(cluster=4, split2=4), 1),
        ("global", tiled(split=2, cluster=2), 1),
        ("gemm", {**FIRST, "cluster": 2}, 2),
        ("gemm", {**FIRST, "split": 2}, 1),
    ],
)
def test_spaces_are_read_from_tiles(family: str, tiles: dict[str, Any], count: int) -> None:
    assert spaces_of(family, tiles) == SPACES[:count]


def test_tiles_that_are_left_to_the_rule_are_in_no_space() -> None:
    with pytest.raises(PlanRefused, match="no parts"):
        spaces_of("dsm", {"rows": 64, "cluster": 4})


def test_points_of_a_space_are_those_that_their_tiles_say() -> None:
    space = kernels_of(resolve("G2:M=128"), "nvidia-h100")
    for name in SPACES:
        found = points_of(space, name)
        assert list(space.prior[found]) == sorted(space.prior[found])
        inside = set(found.tolist())
        for point in range(0, len(space), 37):
            assert (name in spaces_of(*space.tiles(point))) == (point in inside)


def line(family: str, tiles: Any, time: float | None, **notes: Any) -> dict[str, Any]:
    candidate = Candidate(SPEC, family, tiles, notes=notes)
    status = "wrong" if time is None else "ok"
    return {"candidate": candidate.to_json(), "status": status, "microseconds": time, "gpu": "H"}


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


RESULTS = [
    line("eager", {}, 20.0),
    line("global", tiled(), 16.0),
    line("l2", tiled(), 24.0),
    line("l2", tiled(cluster=2), 12.0),
    line("l2", tiled(cluster=4, split2=4), 8.0),
    line("dsm", {"rows": 64, "cluster": 4, "parts": 12}, 10.0, name="random"),
    line("dsm", {"rows": 64, "cluster": 8, "parts": 6}, 40.0, name="random"),
    line("dsm", {"rows": 64, "cluster": 8, "parts": 5}, None, name="random"),
]


def test_made_up_results_are_compared(tmp_path: Path) -> None:
    measured = list(read_measured([written(tmp_path / "a.jsonl", RESULTS)]))
    found, passed = kernels(measured, "nvidia-h100")
    assert passed == 0
    told = compare(found[SPEC], 20.0, 6)
    assert told is not None
    assert told["best"] == {"all": 8.0, "no DSM": 12.0, "no clusters": 16.0}
    assert told["kernels"] == {"all": 7, "no DSM": 3, "no clusters": 2}
    assert told["unfused"] == 16.0
    # Chance is not the best of some chances, and what is wrong is none.
    assert told["random"] == pytest.approx(20.0) and told["random kernels"] == 2
    means = summary([told])
    assert means["DSM factor, best"] == pytest.approx(1.5)
    assert means["multicast factor, best"] == pytest.approx(16 / 12)
    assert means["cluster factor, best"] == pytest.approx(2.0)
    assert means["random factor, best"] == pytest.approx(2.5)
    assert means["spaces"]["all"]["best over eager"] == pytest.approx(2.5)
    assert means["spaces"]["no DSM"]["best over unfused"] == pytest.approx(16 / 12)
    assert means["spaces"]["random"]["best over eager"] == pytest.approx(1.0)


def test_the_first_of_each_space_are_as_many(tmp_path: Path) -> None:
    """The fastest may not be what the estimate puts first: then it was not found."""
    found, _ = kernels(list(read_measured([written(tmp_path / "a", RESULTS)])), "nvidia-h100")
    told = compare(found[SPEC], 20.0, 1)
    assert told is not None
    for name in SPACES:
        inside = [each for each in found[SPEC] if name in each.spaces]
        expected = min(inside, key=lambda each: each.estimate)
        assert told["first"][name] == expected.microseconds


def test_a_space_without_a_kernel_or_no_eager_is_not_compared(tmp_path: Path) -> None:
    fewer = [each for each in RESULTS if each["candidate"]["family"] == "dsm"]
    found, _ = kernels(list(read_measured([written(tmp_path / "a", fewer)])), "nvidia-h100")
    assert compare(found[SPEC], 20.0, 6) is None
    found, _ = kernels(list(read_measured([written(tmp_path / "a", RESULTS)])), "nvidia-h100")
    assert compare(found[SPEC], None, 6) is None


def test_the_last_result_counts_and_open_tiles_are_passed_over(tmp_path: Path) -> None:
    again = line("l2", tiled(cluster=4, split2=4), 9.0)
    open_tiles = line("dsm", {"rows": 64}, 1.0)
    lines = [*RESULTS, again, open_tiles]
    found, passed = kernels(list(read_measured([written(tmp_path / "a", lines)])), "nvidia-h100")
    assert passed == 1
    told = compare(found[SPEC], 20.0, 6)
    assert told is not None and told["best"]["all"] == 9.0


@pytest.mark.parametrize("text", ["{", '{"status": "ok"}', "[]"])
def test_a_line_that_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(RESULTS[0]) + "\n" + text + "\n")
    with pytest.raises(ArtefactRefused, match=r"a\.jsonl, line 2.*Instead: remove the line"):
        list(read_measured([path]))


def test_a_mean_of_ratios() -> None:
    assert mean([0.5, 2.0]) == pytest.approx(1.0)


def test_names_of_workloads() -> None:
    assert name_of(resolve("S3:M=16")) == "S3:M=16"
    other = resolve("S3:M=16,dtype=float16")
    assert name_of(other) == str(other)


def run(*arguments: Any) -> str:
    """What the program prints, run in this process, which has imported TVM already."""
    with redirect_stdout(StringIO()) as printed:
        assert subcommands.run(script.parser(), list(map(str, arguments))) == 0
    return printed.getvalue()


@pytest.mark.nightly
def test_candidates_of_every_space_are_made(tmp_path: Path) -> None:
    out = tmp_path / "candidates.json"
    how = ("make", "G4", "S4", "--m", 16, 128, "--random", 2, "--also", 3)
    run(*how, "--out", out)
    found = read_candidates(out)
    assert len(found) == len(json.loads(out.read_text()))
    target = device("nvidia-h100")
    for name in ("G4:M=16", "G4:M=128", "S4:M=16", "S4:M=128"):
        spec = resolve(name)
        here = [each for each in found if each.spec == str(spec)]
        assert [each.family for each in here].count("eager") == 1
        ours = {each.id: each for each in here if each.family != "eager"}
        space = kernels_of(spec, target.name)
        wanted = [space.tiles(int(p)) for s in SPACES for p in points_of(space, s)[:6]]
        assert {Candidate(str(spec), *each).id for each in wanted} <= ours.keys()
        assert {each.family for each in space.groups} <= {each.family for each in here}
        drawn = [each for each in here if each.notes.get("name") == "random"]
        assert len(drawn) == 2
        for each in drawn:
            assert spaces_of(each.family, each.tiles) == ("all",) and each.family != "global"
        also = [each for each in here if each.notes.get("name") == "also"]
        assert len(also) == 3
        for each in also:
            point = space.find(each.family, each.tiles)
            assert point is not None and space.prior[point] <= 1.5 * space.prior.min()
    again = tmp_path / "again.json"
    run(*how, "--out", again)
    assert again.read_text() == out.read_text()


def test_what_was_measured_is_left_out(tmp_path: Path) -> None:
    out, rest = tmp_path / "candidates.json", tmp_path / "rest.json"
    how = ("make", "G4", "--m", 128, "--random", 2, "--also", 3)
    run(*how, "--out", out)
    found = read_candidates(out)
    lines = [
        {"candidate": each.to_json(), "status": "ok", "microseconds": 9.0, "gpu": "H"}
        for each in found
    ]
    run(*how, "--out", rest, "--measured", written(tmp_path / "a.jsonl", lines))
    left = read_candidates(rest)
    # What judges the model has to be new; eager is what each run is compared with.
    assert {each.notes.get("name", each.family) for each in left} == {"eager", "also"}
    assert len(left) == 4
    assert not {each.id for each in left if each.family != "eager"} & {each.id for each in found}
    # A kernel that was measured, but not by chance, is measured as chance has drawn it.
    for each in lines:
        each["candidate"].pop("name", None)
    run(*how, "--out", rest, "--measured", written(tmp_path / "a.jsonl", lines))
    assert [e.notes.get("name") for e in read_candidates(rest)].count("random") == 2


def test_the_report_of_what_is_recorded(tmp_path: Path) -> None:
    numbers = tmp_path / "ablation.json"
    text = run("report", MEASURED, "--json", numbers)
    told = json.loads(numbers.read_text())
    assert "DSM factor (no DSM / all)" in text and "M=16:" in text and "all rows:" in text
    assert "searched less" in text
    assert told["all"]["workloads"] == len(told["workloads"])
    assert told["passed over"] == 0
    # Chains of the suites, and eight products.
    assert len(told["incomplete"]) + len(told["workloads"]) == 54 + 8
    for each in told["workloads"].values():
        best = each["best"]
        assert best["all"] <= best["no DSM"] <= best["no clusters"]
    wins = sum(each["best"]["all"] < each["best"]["no DSM"] for each in told["workloads"].values())
    assert f"DSM wins {wins} of {len(told['workloads'])} workloads" in text


def test_eager_measured_again_says_how_far_times_drift(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [*RESULTS, line("eager", {}, 22.0)])
    text = run("report", path)
    assert "eager measured again: last over first 1.100" in text
    assert "random factor (random / all): 2.500, of 1 workloads" in text
