"""TVM's CUDA text of a model is compiled by our nvcc, other text as before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import op

from crossfuse.hardware import tvm_target
from crossfuse.runtime.model_artefact import (
    _COMPILE,
    _MARK,
    _WRITTEN,
    compile_marked_text,
    exact_cuda,
)

pytestmark = pytest.mark.cpu
SINE = 'extern "C" __global__ void sine(float* x) { x[threadIdx.x] = sinf(x[threadIdx.x]); }'


@pytest.fixture
def stock() -> Iterator[list[str]]:
    """What TVM compiles by itself."""
    import tvm.support.nvcc

    seen: list[str] = []
    before = tvm.get_global_func(_COMPILE)
    tvm.register_global_func(_COMPILE, lambda code: seen.append(code) or b"stock", override=True)
    yield seen
    tvm.register_global_func(_COMPILE, before, override=True)


def sines() -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64,), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(op.sin(x)))
    return builder.get()


def texts() -> list[str]:
    """CUDA that TVM writes for `sines`."""
    modules: list[Any] = [relax.build(sines(), tvm_target("nvidia-h100")).mod]
    found = []
    while modules:
        module = modules.pop()
        modules += list(module.imports)
        if module.kind == "cuda":
            found.append(module.inspect_source())
    return found


def test_text_is_marked_inside_only() -> None:
    with exact_cuda("sm_90a"):
        (text,) = texts()
    assert text.startswith(f"{_MARK}sm_90a\n") and "sinf" in text
    assert tvm.get_global_func(_WRITTEN, allow_missing=True) is None
    (text,) = texts()
    assert _MARK not in text


def test_a_hook_of_others_is_kept() -> None:
    tvm.register_global_func(_WRITTEN, lambda code, target: f"{code}// theirs")
    try:
        for _ in range(2):
            with exact_cuda("sm_90a"):
                (text,) = texts()
            assert text.startswith(_MARK) and text.endswith("// theirs")
            (text,) = texts()
            assert _MARK not in text and text.endswith("// theirs")
    finally:
        tvm_ffi.remove_global_func(_WRITTEN)


def test_marked_text_is_compiled_without_fast_math(
    stock: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def compiled(code: str, *, arch: str) -> Any:
        given.append((code, arch))
        return type("Cubin", (), {"data": b"ours"})

    monkeypatch.setattr("crossfuse.runtime.nvcc.compile_cubin", compiled)
    for _ in range(2):  # the second one has nothing to do
        compile_marked_text()
    compiler = tvm.get_global_func(_COMPILE)
    assert bytes(compiler(f"{_MARK}sm_90\n{SINE}")) == b"ours"
    assert given == [(f"{_MARK}sm_90\n{SINE}", "sm_90")] and not stock
    assert bytes(compiler(SINE)) == b"stock" and stock == [SINE]


def test_what_tvm_writes_compiles(stock: list[str]) -> None:
    with exact_cuda("sm_90a"):
        (text,) = texts()
    made = bytes(tvm.get_global_func(_COMPILE)(text))
    assert made[:4] == b"\x7fELF" and not stock
