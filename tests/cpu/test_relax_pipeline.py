"""The pipeline from a model to an executable: kernels built, linked, called; phases written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from crossfuse import _tvm as ir
from crossfuse.hardware import tvm_target
from crossfuse.relax import BuildKernels, FuseChains

pytestmark = pytest.mark.cpu

M, K, N, L = 16, 64, 128, 64
SHAPES = {"x": (M, K), "b": (K, N), "d": (N, L), "bias": (L,)}


def model() -> Any:
    """Two layers, and a softmax that no chain takes."""
    given = [relax.Var(n, relax.TensorType(s, "float16")) for n, s in SHAPES.items()]
    x, b, d, bias = given
    op, builder = relax.op, relax.BlockBuilder()
    with builder.function("main", given):
        with builder.dataflow():
            hidden = builder.emit(op.nn.relu(op.matmul(x, b)))
            result = builder.emit(op.add(op.matmul(hidden, d), bias))
            out = builder.emit_output(op.nn.softmax(result, -1))
        builder.emit_func_output(out)
    return builder.get()


def test_kernels_are_linked_into_the_executable(tmp_path: Path) -> None:
    build = BuildKernels(directory=tmp_path)
    mod = build(FuseChains(always=True)(model()))
    (artefact,) = build.artefacts
    assert artefact.shared_object == tmp_path / "crossfuse_gemm_chain.so"
    assert not [each for each in mod.functions.values() if isinstance(each, ir.PrimFunc)]
    assert 'R.call_dps_packed("crossfuse_gemm_chain"' in str(mod["main"])

    machine = relax.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())
    inputs = [tvm.runtime.tensor(np.zeros(each, "float16")) for each in SHAPES.values()]
    # The kernel's own refusal: the machine's tensors lie on the CPU here.
    with pytest.raises(ValueError, match=r"crossfuse_gemm_chain: found cpu:0; limit: a CUDA dev"):
        machine["main"](*inputs)


def test_a_module_without_kernels_stays(tmp_path: Path) -> None:
    build = BuildKernels(directory=tmp_path)
    mod = model()
    assert build(mod).same_as(mod) and build.artefacts == ()


def test_the_pipeline_is_known_by_name_and_writes_its_phases(tmp_path: Path) -> None:
    known = relax.get_pipeline("crossfuse", dump=tmp_path)
    executable = relax.build(model(), tvm_target("nvidia-h100"), relax_pipeline=known)
    assert isinstance(executable, relax.VMExecutable)
    phases = sorted(each.name for each in tmp_path.glob("*.py"))
    assert phases == [
        "01_clean.py",
        "02_fuse_chains.py",
        "03_wide_sums.py",
        "04_legalize.py",
        "05_fuse_cascades.py",
        "06_build_kernels.py",
    ]
    assert "family=" in (tmp_path / "02_fuse_chains.txt").read_text()
    assert "softmax" in (tmp_path / "05_fuse_cascades.txt").read_text()
