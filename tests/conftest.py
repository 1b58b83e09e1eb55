"""Tiers by folder, hypothesis profiles, and a cache that no other run has filled."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Iterator
from datetime import date
from functools import cache, lru_cache
from pathlib import Path
from types import FrameType
from zlib import crc32

import pytest

# Containers often forbid bytecode, and then every process compiles the package from its text, for
# seconds: each of the hundred that tests start, too, which inherit this.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

IN_PARALLEL = "PYTEST_XDIST_WORKER" in os.environ
if IN_PARALLEL:
    # Before anything imports numpy or torch: every core has a test process, and on the small
    # matrices of tests the threads of a product mostly spin while they wait for each other.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU machine without a network runs tests/gpu, which needs no hypothesis
    settings = None


def _outer_frames(frame: FrameType | None, context: int = 1) -> list[inspect.FrameInfo]:
    """`inspect.getouterframes`, with source lines of the innermost frames alone.

    For every function of TVMScript, and every macro in one, TVM takes the whole stack and reads
    those of the third frame. For pytest's many frames they are sought among thousands of modules,
    which took more than half of the time of parsing TVMScript. A frame of no file, such as "<ast>",
    has none, and was sought among all of them three times.
    """
    found: list[inspect.FrameInfo] = []
    while frame is not None:
        code = frame.f_code
        if len(found) < 3 and not code.co_filename.startswith("<"):
            information = tuple(inspect.getframeinfo(frame, context))
        else:
            information = (code.co_filename, frame.f_lineno, code.co_name, None, None)
        found.append(inspect.FrameInfo(frame, *information))
        frame = frame.f_back
    return found


inspect.getouterframes = _outer_frames
gc.disable()  # until all tests are collected

TESTS = Path(__file__).parent
TIERS = ("null", "cpu", "gpu")
# What a folder's tests are when they carry no tier's marker themselves.
TIER_OF_FOLDER = {"null": "null", "cpu": "cpu", "gpu": "gpu", "errors": "cpu"}

if settings is not None:
    # Compiling takes longer than any deadline that would say something about the code under test.
    quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("ci", max_examples=30, derandomize=True, **quiet)
    settings.register_profile("nightly", max_examples=500, print_blob=True, **quiet)
    # The option --hypothesis-profile is applied later and wins.
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@lru_cache(maxsize=1)
def reason_without_hopper() -> str | None:
    """Say why GPU tests cannot run here; None where they can."""
    from crossfuse.hardware import find_gpus

    gpus = find_gpus()
    if any(gpu.capability == (9, 0) for gpu in gpus):
        return None
    found = ", ".join("{} ({}.{})".format(gpu.name, *gpu.capability) for gpu in gpus) or "none"
    return f"needs a CUDA device of compute capability 9.0; found {found}"


def is_nightly(config: pytest.Config) -> bool:
    """Whether all of what there is to test is tested."""
    named = config.getoption("--hypothesis-profile", None)
    return (named or os.environ.get("HYPOTHESIS_PROFILE")) == "nightly"


#: Days after which all cases have run, and which of them this is: every process of a run has the
#: same, and a run of another day can be repeated.
_DAYS = 7
_DAY = int(os.environ.setdefault("CROSSFUSE_TEST_DAY", str(date.today().toordinal() % _DAYS)))
#: Folders of tests/cpu whose tests have many cases that take long.
_MANY_CASES = ("cascade", "emulate", "hopper", "lower", "schedule")
#: Tests of others, whose cases are near-identical: drawn at random, more than 30, or compiled for
#: seconds each.
_ALIKE = {
    ("test_calibrate.py", "test_programs_compile_without_a_warning"),
    ("test_feasible_kernels.py", "test_points_of_the_space_are_planned"),
    ("test_fuzz_cascades.py", "test_as_exact_as_separate_passes"),
    ("test_fuzz_emulated.py", "test_as_exact_as_separate_passes"),
    ("test_padded_rows.py", "test_kernels_are_right"),
    ("test_relax_groups_random.py", "test_a_graph_computes_what_it_did"),
    ("test_rules_ffn.py", "test_every_cluster_size"),
    ("test_rules_ffn.py", "test_the_packaged_shapes_in_small"),
    ("test_rules_split_k.py", "test_every_cluster_size"),
    ("test_workload_build.py", "test_values_on_llvm"),
}
#: In names of tests of which all cases run every day: planted faults and refusals.
_EVERY_DAY = ("caught", "fault", "necessary", "refus", "spill")


@cache
def _has_many_cases(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / "cpu" / each) for each in _MANY_CASES)


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _is_of_another_day(item: pytest.Item) -> bool:
    """Whether a slow test, or a case of one, is left to another day."""
    return _is_slow(item) and crc32(item.nodeid.encode()) % _DAYS != _DAY % _DAYS


def _cases_of_other_days(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of tests that compile or emulate many cases, those that are not of this day.

    Each takes up to seconds, and a run on two cores is to end within a quarter of an hour. A day
    has every seventh case, the next day the next ones, a night all. Planted faults and refusals
    stay, and what has few cases.
    """
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        name = getattr(item, "originalname", None) or item.name
        many = _has_many_cases(item.path) or (item.path.name, name) in _ALIKE
        if many and name != item.name and not _is_slow(item):
            cases.setdefault((item.path, name), []).append(item)
    return [
        item
        for (_, name), found in cases.items()
        if len(found) > 4 and not any(each in name for each in _EVERY_DAY)
        for place, item in enumerate(found)
        if place % _DAYS != _DAY % _DAYS
    ]


def pytest_collection_finish() -> None:
    """Take what was imported and collected for what stays: no cycles of garbage are sought there.

    That is most of what there is, and looking through it took a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    # Beside programs of thousands of nodes, the interpreter's own 700 new objects are soon made.
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every test its tier, before -m selects by it, and skip what this machine cannot run."""
    # Who names a test runs it.
    if not is_nightly(config) and not any("::" in each for each in config.args):
        later = [
            each for each in items if each.get_closest_marker("nightly") or _is_of_another_day(each)
        ]
        later += _cases_of_other_days(items)
        config.hook.pytest_deselected(items=later)
        left_out = set(map(id, later))
        items[:] = [each for each in items if id(each) not in left_out]
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            folder = item.path.relative_to(TESTS).parts[0]
            if folder in TIER_OF_FOLDER:
                item.add_marker(TIER_OF_FOLDER[folder])
        if item.get_closest_marker("gpu"):
            reason = reason_without_hopper()
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point the kernel cache at a folder of this run, never at the user's.

    The processes of a run share it: all need the emulator's runtime, and many the same kernels.
    """
    base = tmp_path_factory.getbasetemp()
    run = base.parent if IN_PARALLEL else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(run / "cache"))
        patch.setenv("XDG_DATA_HOME", str(run / "data"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_command_line() -> Iterator[None]:
    """Read the annotations of all commands once, which takes longer than most commands run."""
    import typer.main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", lru_cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Draw the same numbers in every run, whatever ran before in the process.

    Results are held to tolerances that some draws in a thousand miss by cancellation.
    """
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
