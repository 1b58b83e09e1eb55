"""Nsight Compute's answers, and its command line."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from crossfuse.bench import counters
from crossfuse.bench.counters import DURATION, L2, METRICS, READ, TO_SM, WRITE
from crossfuse.errors import EnvironmentRefused
from null.ncu_logs import DENIED, FAILED, LOG


def test_kernels_of_a_computation_are_summed() -> None:
    found = counters.parse(LOG, METRICS)
    assert found.kernels == ("main_0", "main_1")
    assert found.passes == 1
    assert found.totals == {
        READ: 272_105_472.0,
        WRITE: 5_120.0,
        DURATION: 111_936.0,
        TO_SM: 301_989_888.0,
        L2: 315_000_000.0,
    }


def test_units_are_read_and_not_taken_for_granted() -> None:
    text = LOG.replace('"byte","byte","ns"', '"Mbyte","Kbyte","usecond"')
    text = text.replace("181,403,648", "181.5").replace("90,701,824", "90.5")
    totals = counters.parse(text, METRICS).totals
    assert totals[READ] == 272.0e6
    assert totals[WRITE] == 5_120e3
    assert totals[DURATION] == 111_936e3


def test_most_passes_of_a_kernel_count() -> None:
    text = LOG.replace(
        '"main_1" - 1: 0%....50%....100% - 1 pass', '"main_1" - 1: 0%....100% - 3 passes'
    )
    assert counters.parse(text, METRICS).passes == 3


def test_names_of_kernels_may_have_commas_and_quotes() -> None:
    text = LOG.replace('"main_0","1"', '"void f<4, ""x"">(float *, int)","1"')
    assert counters.parse(text, METRICS).kernels[0] == 'void f<4, "x">(float *, int)'


@pytest.mark.parametrize(
    ("text", "found", "advice"),
    [
        (DENIED, "ERR_NVGPUCTRPERM", "NVreg_RestrictProfilingToAdminUsers=0"),
        (
            "==PROF== Connected\n==WARNING== No kernels were profiled.\n",
            "No kernels were profiled",
            "--counters",
        ),
        ("", "no word of ncu", "--counters"),
        (FAILED, "reported by the driver: LaunchFailed", "--counters"),
        ("==ERROR== Failed to find metric x.sum\n==PROF== y\n", "Failed to find", "--counters"),
        (LOG.replace('"181,403,648"', '"n/a"'), "'n/a' in 'byte' for dram__bytes_read", "release"),
        (LOG.replace('"byte","byte","ns"', '"byte","B","ns"'), "'4,096' in 'B'", "release"),
        (LOG.replace("lts__t_bytes.sum", "lts__t.sum"), "None in None for lts", "release"),
    ],
)
def test_what_is_no_table_is_refused(text: str, found: str, advice: str) -> None:
    with pytest.raises(EnvironmentRefused) as caught:
        counters.parse(text, METRICS)
    assert found in caught.value.refusal.found
    assert advice in caught.value.refusal.instead


def test_command_leaves_caches_alone_and_profiles_what_is_marked() -> None:
    words = counters.command(
        Path("/opt/ncu"), ("a.sum", "b.sum"), Path("log"), ("python", "-m", "x")
    )
    assert words[:4] == ("env", "LC_ALL=C", "CROSSFUSE_COOPERATIVE=0", "/opt/ncu")
    assert words[-3:] == ("python", "-m", "x")
    options = dict(pairwise(words))
    assert options["--metrics"] == "a.sum,b.sum"
    assert options["--cache-control"] == "none"
    assert options["--profile-from-start"] == "off"
    assert options["--log-file"] == "log"


def test_program_is_found_in_the_path_then_in_the_toolkit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(counters, "_SYSTEM_ROOT", tmp_path / "none")
    monkeypatch.setattr(counters, "_PACKAGES", tmp_path / "packages")
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(EnvironmentRefused) as caught:
        counters.find_ncu()
    assert caught.value.refusal.found == "no ncu"
    for place in ("packages/2024.3", "packages/2025.3", "toolkit/bin"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "ncu").touch()
    assert counters.find_ncu() == tmp_path / "packages/2025.3/ncu"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert counters.find_ncu() == tmp_path / "toolkit/bin/ncu"
    monkeypatch.setattr(
        counters.shutil, "which", lambda name: str(tmp_path / "packages/2024.3/ncu")
    )
    assert counters.find_ncu() == tmp_path / "packages/2024.3/ncu"
