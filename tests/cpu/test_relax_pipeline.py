"""The pipeline from a model to an executable: kernels built, linked, called; phases written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from crossfuse import _tvm as ir
from crossfuse.emulate.llvm import serialise
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


def kernels(folder: Path) -> tuple[Any, BuildKernels]:
    """The model with its kernel as an object in a folder."""
    build = BuildKernels(directory=folder)
    return build(FuseChains(always=True)(model())), build


#: Loads a model that another process exported, and runs it.
ELSEWHERE = """
import sys
import numpy as np, tvm
from tvm import relax
folder = sys.argv[1]
machine = relax.VirtualMachine(tvm.runtime.load_module(f"{folder}/model.so"), tvm.cpu())
given = np.load(f"{folder}/given.npz")
result = machine["main"](*(tvm.runtime.tensor(each) for each in given.values()))
np.save(f"{folder}/result.npy", result.numpy())
"""


def elsewhere(executable: Any, folder: Path, inputs: dict[str, Any]) -> Any:
    """Export a model, and run it in a process of its own."""
    executable.export_library(folder / "model.so")
    np.savez(folder / "given.npz", **inputs)
    command = [sys.executable, "-c", ELSEWHERE, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_kernels_are_linked_into_the_executable_and_what_it_exports(tmp_path: Path) -> None:
    mod, build = kernels(tmp_path)
    (found,) = build.objects
    assert found.path == tmp_path / "crossfuse_gemm_chain.o"
    assert not [each for each in mod.functions.values() if isinstance(each, ir.PrimFunc)]
    assert 'R.call_dps_packed("crossfuse_gemm_chain"' in str(mod["main"])
    executable = tvm.compile(mod, target="llvm")
    found.path.unlink()

    zeros = {name: np.zeros(each, "float16") for name, each in SHAPES.items()}
    machine = relax.VirtualMachine(executable, tvm.cpu())
    # The kernel's own refusal: the machine's tensors lie on the CPU here.
    refusal = "crossfuse_gemm_chain: found cpu:0; limit: a CUDA dev"
    with pytest.raises(ValueError, match=refusal):
        machine["main"](*map(tvm.runtime.tensor, zeros.values()))
    done = elsewhere(executable, tmp_path, zeros)
    assert done.returncode and refusal in done.stderr


def on_cpu(image_of: dict[str, Any]) -> Any:
    """Builds an object of the scheduled function, which runs on the CPU, in a kernel's place."""

    def build(image: Any, folder: Any, **_: Any) -> Any:
        path = Path(folder) / f"{image.name}.o"
        named = serialise(image_of[image.name]).with_attr("global_symbol", image.name)
        tvm.compile(tvm.IRModule({image.name: named}), target="llvm").mod.write_to_file(str(path))
        return SimpleNamespace(path=path, manifest=SimpleNamespace(name=image.name))

    return build


def test_an_exported_model_runs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = FuseChains(always=True)(model())
    functions = {str(name.name_hint): func for name, func in fused.functions_items()}
    monkeypatch.setattr("crossfuse.relax.build_kernels.build_object", on_cpu(functions))
    mod = BuildKernels(directory=tmp_path)(fused)
    draw = np.random.default_rng(1)
    given = {n: draw.uniform(-0.5, 0.5, s).astype("float16") for n, s in SHAPES.items()}
    done = elsewhere(tvm.compile(mod, target="llvm"), tmp_path, given)
    assert done.returncode == 0, done.stderr

    x, b, d, bias = (each.astype("float64") for each in given.values())
    logits = np.maximum(x @ b, 0) @ d + bias
    due = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(np.load(tmp_path / "result.npy"), due, rtol=2e-2)


def test_a_module_without_kernels_stays(tmp_path: Path) -> None:
    build = BuildKernels(directory=tmp_path)
    mod = model()
    assert build(mod).same_as(mod) and build.objects == ()


def test_the_pipeline_is_known_by_name_and_writes_its_phases(tmp_path: Path) -> None:
    known = relax.get_pipeline("crossfuse", dump=tmp_path)
    executable = relax.build(model(), tvm_target("nvidia-h100"), relax_pipeline=known)
    assert isinstance(executable, relax.VMExecutable)
    phases = sorted(each.name for each in tmp_path.glob("*.py"))
    assert phases == [
        "01_clean.py",
        "02_fuse_chains.py",
        "03_legalize.py",
        "04_fuse_cascades.py",
        "05_build_kernels.py",
    ]
    assert "family=" in (tmp_path / "02_fuse_chains.txt").read_text()
    assert "softmax" in (tmp_path / "04_fuse_cascades.txt").read_text()
