"""TVM and torch find a package that is on the path without being installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Takes our entry points away, as if the package were on the path alone.
NOT_INSTALLED = """
from importlib import metadata
entry_points = metadata.entry_points
def others(**by):
    found = entry_points(**by)
    if isinstance(found, dict):  # all of them, before Python 3.12
        found = [each for group in found.values() for each in group]
    return metadata.EntryPoints(each for each in found if not each.name.startswith("crossfuse"))
metadata.entry_points = others
"""
TVM = """
assert hasattr(tvm.s_tir.Schedule, "dsm_reduce")
from tvm import relax
from tvm.tirx.compilation_pipeline import PIPELINE_MAP
assert relax.get_pipeline("crossfuse") is not None and "crossfuse" in PIPELINE_MAP
assert tvm.__spec__.loader is tvm.__loader__ and "crossfuse" not in str(tvm.__loader__)
"""
TORCH = """
x = torch.randn(2, 8)
linear = torch.nn.Linear(8, 4)
options = {"rest": "eager"}
with torch.inference_mode():
    got = torch.compile(linear, backend="crossfuse", options=options)(x)
    assert torch.equal(got, linear(x))
assert "crossfuse" in torch._dynamo.list_backends()
"""


def run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOT_INSTALLED + program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


#: Others ask whether TVM is there before anybody loads it, as dynamo does.
ASKED = "import crossfuse.torch, importlib.util as u; assert u.find_spec('tvm'); import tvm, torch"


@pytest.mark.parametrize("imports", [ASKED, "import torch._dynamo, tvm, crossfuse"])
def test_both_find_the_package(imports: str) -> None:
    """One process for both: to import them takes most of the time."""
    pytest.importorskip("torch")
    run(f"{imports}\nimport torch\n{TVM}{TORCH}")


def test_an_installed_package_is_found_as_before() -> None:
    pytest.importorskip("torch")
    program = f"import crossfuse, torch, tvm\n{TVM}{TORCH}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_programs_may_leave_torch_to_those_who_need_it() -> None:
    """TVM imports torch, but not for commands; tensors of a torch that comes later reach it."""
    pytest.importorskip("torch")
    run("""
import sys
from crossfuse._discovery import without_torch
without_torch()
import tvm
assert "torch" not in sys.modules and hasattr(tvm.s_tir.Schedule, "dsm_reduce")
import torch, tvm_ffi
x = torch.arange(6.0).reshape(2, 3)
assert torch.equal(tvm_ffi.get_global_func("testing.echo")(x), x)
""")


def test_a_graph_that_was_fused_before_needs_no_tvm() -> None:
    """The backend's modules load it where a graph is new: its import takes a second."""
    pytest.importorskip("torch")
    run("""
import sys
import crossfuse.torch.backend
assert not {"tvm", "crossfuse._tvm"} & set(sys.modules)
""")
