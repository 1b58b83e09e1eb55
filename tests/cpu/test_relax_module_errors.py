"""Relax modules that outlining refuses, and torch modules that are not imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from crossfuse.errors import ArgumentRefused, WorkloadRefused
from crossfuse.relax import import_torch
from crossfuse.relax.outline import outline
from crossfuse.workload import chain_module
from crossfuse.workload.dtypes import FLOAT_TYPES

TYPES = ", ".join(FLOAT_TYPES)
op = relax.op
Build = Callable[..., Any]


def module(build: Build, *operands: tuple[tuple[Any, ...], str]) -> tvm.IRModule:
    """A function ``main`` of the given operands p0, p1, ..."""
    params = [relax.Var(f"p{i}", relax.TensorType(*o)) for i, o in enumerate(operands)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            output = builder.emit_output(build(builder.emit, *params))
        builder.emit_func_output(output)
    return builder.get()


def fused(mod: tvm.IRModule) -> tvm.IRModule:
    passes = (
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
    )
    return tvm.transform.Sequential(passes)(mod)


def chain(emit: Any, x: Any, first: Any, second: Any) -> Any:
    return op.matmul(emit(op.nn.relu(emit(op.matmul(x, first)))), second)


def with_operand(emit: Any, x: Any, first: Any, second: Any, operand: Any) -> Any:
    hidden = op.where(operand, emit(op.matmul(x, first)), relax.const(0.0, "float32"))
    return op.matmul(emit(hidden), second)


def widened(emit: Any, x: Any, first: Any, second: Any) -> Any:
    hidden = emit(op.nn.relu(emit(op.matmul(x, first, out_dtype="float32"))))
    return op.matmul(hidden, emit(op.astype(second, "float32")))


def of_two(emit: Any, x: Any, y: Any, gate: Any, up: Any, down: Any) -> Any:
    hidden = op.multiply(emit(op.matmul(x, gate)), emit(op.matmul(y, up)))
    return op.matmul(emit(hidden), down)


def on_constant(emit: Any, first: Any, second: Any) -> Any:
    ones = relax.const(np.ones((3, 2), np.float32))
    return chain(emit, ones, first, second)


F32 = "float32"
CHAIN = [((4, 8), F32), ((8, 5), F32), ((5, 6), F32)]
LAYERS = "A @ B or A @ B_gate and A @ B_up, then element-wise, then @ D, and so on"
MODULES: dict[str, tuple[Callable[[], tvm.IRModule], str]] = {
    "dynamic": (
        lambda: module(chain, ((tirx.Var("n", "int64"), 8), F32), *CHAIN[1:]),
        "relax.matmul: found the dynamic shape R.shape([n, 5]); limit: static shapes. "
        "Instead: export the model with the extents it is to run at.",
    ),
    "batched weights": (
        lambda: module(chain, ((2, 4, 8), F32), ((2, 8, 5), F32), CHAIN[2]),
        "relax.matmul (lv): found a right-hand side of rank 3; limit: weights of rank 2. "
        "Instead: multiply one matrix at a time.",
    ),
    "rank 4": (
        lambda: module(chain, ((2, 2, 4, 8), F32), *CHAIN[1:]),
        "main: found p0 of rank 4; limit: [M, K] or [B, S, K]. Instead: reshape the input.",
    ),
    "integers": (
        lambda: module(chain, *(((shape), "int32") for shape, _ in CHAIN)),
        f"p0: found int32; limit: {TYPES}. Instead: convert the model to one of these.",
    ),
    "mixed types": (
        lambda: module(widened, *((shape, "float16") for shape, _ in CHAIN)),
        "main: found p0 float16, p1 float16, lv1 float32, p2 float16; limit: one type for all "
        "operands. Instead: convert the model to one type.",
    ),
    "mask": (
        lambda: module(with_operand, *CHAIN, ((4, 5), "bool")),
        f"p3: found bool; limit: element-wise operands of {TYPES}. "
        "Instead: convert the operand to one of these.",
    ),
    "two inputs": (
        lambda: module(of_two, CHAIN[0], CHAIN[0], CHAIN[1], CHAIN[1], CHAIN[2]),
        "relax.matmul (lv1): found products of different inputs, p0 and p1; "
        f"limit: {LAYERS}. Instead: join the inputs, or split the graph.",
    ),
    "constant input": (
        lambda: module(on_constant, ((2, 5), F32), CHAIN[2]),
        "relax.matmul (lv): found a constant input; limit: a parameter. "
        "Instead: make it a parameter.",
    ),
    "legalised": (
        lambda: relax.transform.LegalizeOps()(module(chain, *CHAIN)),
        "main: found a call of relax.call_tir; limit: calls of Relax operators. "
        "Instead: pass the model before LegalizeOps.",
    ),
    "fused": (
        lambda: fused(module(chain, *CHAIN)),
        "main: found a call of fused_matmul_relu; limit: calls of Relax operators. "
        "Instead: pass the model before LegalizeOps.",
    ),
    "nothing": (
        lambda: tvm.IRModule({}),
        "module: found no Relax function; limit: one Relax function, or main. "
        "Instead: name the function main.",
    ),
    "several functions": (
        lambda: tvm.IRModule({name: module(chain, *CHAIN)["main"] for name in ("one", "other")}),
        "module: found one, other; limit: one Relax function, or main. "
        "Instead: name the function main.",
    ),
    "no operator": (
        lambda: module(lambda emit, x: x, CHAIN[0]),
        "main: found no operator; limit: two matrix products. Instead: leave the model as it is.",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_refused(name: str) -> None:
    make, message = MODULES[name]
    mod = make()
    with pytest.raises(WorkloadRefused) as caught:
        outline(mod)
    assert str(caught.value) == f"outline: {message}"


# ---- import ----


def test_training_mode_is_refused() -> None:
    torch = pytest.importorskip("torch")
    model = chain_module(4, 8, "float32")
    model.project.train()
    with pytest.raises(WorkloadRefused) as caught:
        import_torch(model, [torch.zeros(2, 4)])
    assert str(caught.value) == (
        "torch-import: Chain: found project in training mode; "
        "limit: modules in evaluation mode. Instead: call module.eval() first."
    )
    with pytest.raises(WorkloadRefused, match="found the module in training mode"):
        import_torch(torch.nn.Linear(4, 4), [torch.zeros(2, 4)])


@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (3, "int"), ([1.0], "list")])
def test_other_inputs_than_tensors_are_refused(value: object, kind: str) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(WorkloadRefused) as caught:
        import_torch(chain_module(4, 8, "float32"), [torch.zeros(2, 4), value])
    assert str(caught.value) == (
        f"torch-import: input 1: found a {kind}; limit: tensors only, because other values "
        "become constants of the graph. "
        "Instead: close over it in a wrapper module, or pass it as a tensor."
    )


def test_other_objects_than_modules_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentRefused) as caught:
        import_torch(torch.relu, [torch.zeros(2, 4)])
    assert str(caught.value) == (
        "argument: module of import_torch: found a builtin_function_or_method; limit: a Module. "
        "Instead: pass a Module."
    )


def test_control_flow_on_values_is_refused() -> None:
    torch = pytest.importorskip("torch")

    class Branch(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 0 else -x

    with pytest.raises(WorkloadRefused) as caught:
        import_torch(Branch().eval(), [torch.zeros(2, 4)])
    assert str(caught.value).startswith("torch-import: Branch: found GuardOnDataDependentSymNode: ")
    assert caught.value.refusal.limit == "modules that torch.export.export takes"


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_operators_unknown_to_the_importer_are_named() -> None:
    torch = pytest.importorskip("torch")

    class Spectrum(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.fft.fft(x).real

    with pytest.raises(WorkloadRefused, match=r"found aten\._fft_r2c\.default, .* complex64"):
        import_torch(Spectrum().eval(), [torch.zeros(2, 4)])
