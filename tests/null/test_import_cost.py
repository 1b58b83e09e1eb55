"""What `import crossfuse` and the command line load, and how long they take."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Loaded by nobody who has not asked for them. TVM itself loads torch and tvm.relax, so what counts
# is what comes on top of `import tvm`.
HEAVY = (
    "onnx",
    "rich",
    "scipy",
    "sympy",
    "torch",
    "tvm.relax",
    "tvm.s_tir.tensor_intrin",
    "typer",
    "xgboost",
)
# TVM's entry point would load the package inside `import tvm` and hide its cost there.
WITHOUT_ENTRY_POINT = """
from importlib import metadata
entry_points = metadata.entry_points
metadata.entry_points = lambda **by: () if by.get("group") == "tvm.backends" else entry_points(**by)
"""
MEASURE = """
import json, sys, time
before = set(sys.modules)
start = time.process_time()
{statement}
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def measure(statement: str, *, after: str = "") -> tuple[float, list[str]]:
    """Run `after`, then `statement`, in a new interpreter; seconds and modules of the latter."""
    program = after + MEASURE.format(statement=statement)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    seconds, modules = json.loads(result.stdout.splitlines()[-1])
    return seconds, modules


@pytest.fixture(scope="module")
def import_after_tvm() -> tuple[float, list[str]]:
    return measure("import crossfuse", after=WITHOUT_ENTRY_POINT + "import tvm\n")


@pytest.mark.parametrize("module", HEAVY)
def test_import_loads_nothing_heavy_beyond_tvm(
    import_after_tvm: tuple[float, list[str]], module: str
) -> None:
    _, modules = import_after_tvm
    assert module not in modules


def test_import_takes_under_a_second_beyond_tvm(
    import_after_tvm: tuple[float, list[str]],
) -> None:
    seconds, _ = import_after_tvm
    assert seconds < 1


def test_version_guard_loads_no_upstream_package() -> None:
    _, modules = measure("import crossfuse._compat as c; c.check_versions()", after=stub_package())
    assert not {"tvm", "tvm_ffi", "torch", "numpy"} & set(modules)


def stub_package() -> str:
    """Give the interpreter the package's folder without running its __init__."""
    import crossfuse

    return (
        "import sys, types\n"
        "package = types.ModuleType('crossfuse')\n"
        f"package.__path__ = {list(crossfuse.__path__)!r}\n"
        "sys.modules['crossfuse'] = package\n"
    )


def test_command_line_starts_light() -> None:
    runs = [measure("import crossfuse.cli") for _ in range(3)]
    assert min(seconds for seconds, _ in runs) < 1
    assert not {"tvm", "torch", "numpy"} & set(runs[0][1])
