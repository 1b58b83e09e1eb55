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

import crossfuse
from crossfuse import _tvm as ir
from crossfuse.emulate.serialise import serialise
from crossfuse.hardware import tvm_target
from crossfuse.relax import BuildKernels, FuseChains
from crossfuse.relax.build_kernels import _external

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


@pytest.mark.slow
def test_kernels_are_linked_into_the_executable_and_what_it_exports(tmp_path: Path) -> None:
    mod, build = kernels(tmp_path)
    (found,) = build.kernels
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


def on_cpu(_kind: Any, functions: dict[str, Any], _target: Any, folder: Path, _jobs: int) -> Any:
    """Objects of scheduled functions, which run on the CPU, in the place of kernels."""
    made = []
    for name, func in functions.items():
        path = folder / f"{name}.o"
        named = serialise(func).with_attr("global_symbol", name)
        tvm.compile(tvm.IRModule({name: named}), target="llvm").mod.write_to_file(str(path))
        made.append(
            SimpleNamespace(
                path=path,
                manifest=SimpleNamespace(name=name, launches=[SimpleNamespace(early=False)]),
            )
        )
    return tuple(made)


@pytest.mark.slow
def test_an_exported_model_runs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = FuseChains(always=True)(model())
    monkeypatch.setattr("crossfuse.relax.build_kernels.built", on_cpu)
    mod = BuildKernels(directory=tmp_path)(fused)
    draw = np.random.default_rng(1)
    given = {n: draw.uniform(-0.5, 0.5, s).astype("float16") for n, s in SHAPES.items()}
    done = elsewhere(tvm.compile(mod, target="llvm"), tmp_path, given)
    assert done.returncode == 0, done.stderr

    x, b, d, bias = (each.astype("float64") for each in given.values())
    logits = np.maximum(x @ b, 0) @ d + bias
    due = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(np.load(tmp_path / "result.npy"), due, rtol=2e-2)


@pytest.mark.slow
def test_executables_are_exported_beside_their_kernels(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    fuse = FuseChains(always=True)
    mod = BuildKernels(directory=folder, link=False)(fuse(model()))
    tvm.compile(mod, target="llvm").export_library(str(tmp_path / "model.so"))

    kernels = crossfuse.load_kernels(folder)
    assert list(kernels) == ["crossfuse_gemm_chain"]
    plan, (outcome,) = kernels.table.plans["crossfuse_gemm_chain"], fuse.outcomes
    assert (plan["family"], plan["microseconds"]) == (outcome.family, outcome.microseconds)
    assert kernels["crossfuse_gemm_chain"].manifest.metadata == {"plan": plan}
    kernels.register()
    loaded = tvm.runtime.load_module(str(tmp_path / "model.so"))
    machine = relax.VirtualMachine(loaded, tvm.cpu())
    inputs = [tvm.runtime.tensor(np.zeros(each, "float16")) for each in SHAPES.values()]
    with pytest.raises(ValueError, match=r"crossfuse_gemm_chain: found cpu:0; limit: a CUDA dev"):
        machine["main"](*inputs)


def test_a_module_without_kernels_stays(tmp_path: Path) -> None:
    build = BuildKernels(directory=tmp_path)
    mod = model()
    assert build(mod).same_as(mod) and build.kernels == ()


def test_kernels_of_several_results_are_called_with_all() -> None:
    kinds = [relax.TensorType((M, K), "float16"), relax.TensorType((M,), "float32")]
    given = relax.Tuple([relax.Var("x", kinds[0])])
    call = relax.call_tir(tvm.ir.GlobalVar("norm"), given, out_ty=kinds)
    made = _external(call, first=False)
    assert str(made.args[0].global_symbol) == "norm"
    assert [str(each) for each in made.ty_args[0].fields] == [str(each) for each in kinds]


def test_the_pipeline_is_known_by_name_and_writes_its_phases(tmp_path: Path) -> None:
    known = relax.get_pipeline("crossfuse", dump=tmp_path)
    executable = relax.build(model(), tvm_target("nvidia-h100"), relax_pipeline=known)
    assert isinstance(executable, relax.VMExecutable)
    phases = sorted(each.name for each in tmp_path.glob("*.py"))
    assert phases == [
        "01_clean.py",
        "02_fuse_chains.py",
        "03_wide_arithmetic.py",
        "04_legalize.py",
        "05_fuse_cascades.py",
        "06_build_kernels.py",
        "07_keep_nans.py",
    ]
    assert "family=" in (tmp_path / "02_fuse_chains.txt").read_text()
    assert "softmax" in (tmp_path / "05_fuse_cascades.txt").read_text()
