"""`compile_model`: models of each framework, the report, what is refused."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tvm import relax

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

import crossfuse  # noqa: E402
from crossfuse import RefusedError, compile_model  # noqa: E402
from crossfuse.errors import EnvironmentRefused  # noqa: E402
from crossfuse.importers import read_model  # noqa: E402
from crossfuse.runtime.tensors import to_numpy  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]
M, D, H = 8, 32, 64
CPU: dict[str, Any] = {"always": True, "runs_on": "llvm"}


class Mlp(nn.Module):
    """Two layers with biases, and a softmax behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.expand, self.contract = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.contract(torch.relu(self.expand(x))), -1)


def due(x: np.ndarray, module: nn.Module) -> np.ndarray:
    with torch.no_grad():
        return copy.deepcopy(module).double()(torch.from_numpy(x).double()).numpy()


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((M, D)).astype("float16")


def close(got: Any, exact: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(got, "float64"), exact, rtol=3e-3, atol=3e-4)


def test_no_rows_and_copies_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"shape \[0, 8\]; limit: at least one element"):
        compile_model(nn.Linear(8, 4).eval(), (torch.zeros(0, 8),), **CPU)
    fn = compile_model(nn.Linear(8, 4).eval(), (torch.zeros(2, 8),), **CPU)
    with pytest.raises(RefusedError, match=r"a tensor of the meta device; limit: tensors that"):
        fn(torch.zeros(2, 8, device="meta"))
    for each in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(RefusedError, match=r"a copy of it, or a pickle; .*CompiledModel.exp"):
            each(fn)


def test_torch_programs_chains_and_cascades(x: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = Mlp().half().eval(), torch.from_numpy(x)
    fn = compile_model(torch.export.export(module, (given,)), **CPU)
    got = fn(given)
    assert isinstance(got, torch.Tensor) and got.dtype == torch.float16
    assert fn.report.fused[0] == "crossfuse_gemm_chain"
    text = fn.report.text()
    assert "crossfuse_gemm_chain, about" in text and "softmax" in text
    close(got, due(x, module))
    with pytest.raises(RefusedError, match=r"x: found float16\[4, 32\]; limit: float16\[8, 32\]"):
        fn(given[:4])
    with pytest.raises(RefusedError, match="x: found a list; limit: tensors of torch and arrays"):
        fn([0.0])
    with pytest.raises(RefusedError, match="inputs: found 2 of them; limit: one for each of x"):
        fn(given, given)
    with pytest.raises(RefusedError, match=r"x: found an array of other strides; limit: row-major"):
        fn(given.t().contiguous().t())
    monkeypatch.setattr("tvm.cuda", lambda: SimpleNamespace(exist=False))
    elsewhere = replace(fn, runs_on="cuda")
    with pytest.raises(EnvironmentRefused, match="found no GPU; limit: a Hopper GPU, and a TVM wi"):
        elsewhere(given)


def test_modules_of_frontend_nn(x: np.ndarray) -> None:
    from tvm.relax.frontend import nn as tvm_nn
    from tvm.relax.frontend.nn import op

    class Model(tvm_nn.Module):
        def __init__(self) -> None:
            self.expand = tvm_nn.Linear(D, H, dtype="float16")
            self.contract = tvm_nn.Linear(H, D, dtype="float16")

        def forward(self, x: tvm_nn.Tensor) -> tvm_nn.Tensor:
            return op.softmax(self.contract(op.relu(self.expand(x))), -1)

    module, same = Model(), Mlp().half().eval()
    with pytest.raises(RefusedError, match=r"expand\.weight: found a parameter without a value"):
        read_model(module, [x])
    values = {name: to_numpy(each) for name, each in same.state_dict().items()}
    for name, each in module.named_parameters():
        each.data = values[name]
    fn = compile_model(module, [x], **CPU)
    got = fn(x)
    assert isinstance(got, np.ndarray) and fn.report.fused[0] == "crossfuse_gemm_chain"
    close(got, due(x, same))
    with pytest.raises(RefusedError, match=r"found 2 of them; limit: one for each argument .*: x"):
        read_model(module, [x, x])


def onnx_model(module: nn.Module, rows: int | str = M) -> Any:
    onnx = pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
    helper, half = onnx.helper, onnx.TensorProto.FLOAT16
    weights = {name: to_numpy(each) for name, each in module.state_dict().items()}
    weights = {name: each.T.copy() for name, each in weights.items()}
    nodes = [
        helper.make_node("MatMul", ["x", "expand.weight"], ["a"]),
        helper.make_node("Add", ["a", "expand.bias"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "contract.weight"], ["d"]),
        helper.make_node("Add", ["d", "contract.bias"], ["e"]),
        helper.make_node("Softmax", ["e"], ["y"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", half, [rows, D])],
        [helper.make_tensor_value_info("y", half, [rows, D])],
        [onnx.numpy_helper.from_array(each, name) for name, each in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
def test_onnx_models_and_files(x: np.ndarray, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")

    module = Mlp().half().eval()
    model = onnx_model(module)
    path = tmp_path / "mlp.onnx"
    onnx.save(model, path)
    fn = compile_model(path, **CPU)
    assert fn.imported.inputs == ("x",) and len(fn.imported.params) == 4
    assert fn.report.fused[0] == "crossfuse_gemm_chain"
    close(fn(x), due(x, module))

    open_one = onnx_model(module, "batch")
    with pytest.raises(RefusedError, match=r"x: found extents batch left open.*pass shapes="):
        read_model(open_one)
    given = read_model(open_one, shapes={"x": (M, D)}, opset=17)
    assert [int(each) for each in given.mod["main"].params[0].ty.shape.values] == [M, D]
    fn = compile_model(open_one, shapes={"x": ("rows", D)}, bins=(16,), **CPU)
    assert fn.report.fused[0] == "crossfuse_gemm_chain_rows"
    for rows in (1, M, 20):
        close(fn(x.repeat(3, 0)[:rows]), due(x.repeat(3, 0)[:rows], module))
    with pytest.raises(RefusedError, match="shapes: found y; limit: inputs of the model: x"):
        read_model(open_one, shapes={"x": (M, D), "y": (1,)})
    with pytest.raises(RefusedError, match=r"found FileNotFoundError: .*; limit: an ONNX model"):
        read_model(str(tmp_path / "other.onnx"))
    model.graph.node[2].op_type = "NoSuchThing"
    with pytest.raises(RefusedError, match=r"NoSuchThing.*limit: operators that TVM's ONNX"):
        read_model(model)


def relax_model() -> Any:
    given = [
        relax.Var(name, relax.TensorType(shape, "float16"))
        for name, shape in {"x": (M, D), "b": (D, H), "d": (H, D)}.items()
    ]
    op, builder = relax.op, relax.BlockBuilder()
    with builder.function("main", given):
        with builder.dataflow():
            hidden = builder.emit(op.nn.relu(op.matmul(*given[:2])))
            results = [builder.emit_output(op.matmul(hidden, given[2]))]
            results.append(builder.emit_output(op.sum(given[0], -1)))
        builder.emit_func_output(relax.Tuple(results))
    return builder.get()


def test_relax_modules_whose_weights_are_inputs(x: np.ndarray) -> None:
    fn = compile_model(relax_model(), **CPU)
    random = np.random.default_rng(1)
    b, d = (random.standard_normal(each).astype("float16") / 8 for each in ((D, H), (H, D)))
    product, total = fn(x, b, d)
    wide = [each.astype("float64") for each in (x, b, d)]
    np.testing.assert_allclose(product, np.maximum(wide[0] @ wide[1], 0) @ wide[2], atol=2e-2)
    np.testing.assert_allclose(total, wide[0].sum(-1), atol=2e-2)
    assert fn.imported.inputs == ("x", "b", "d")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": 3}, "model: found a int; limit: a torch module or exported program, an ONNX"),
        ({"model": Mlp()}, "Mlp: found no example inputs; limit: one tensor for each input"),
        (
            {"model": "def @main(%x: Tensor[(1), float32]) {"},
            "Relay; limit: Relax; Relay was remov",
        ),
        ({"model": Mlp(), "opset": 3}, "opset: found it for a Mlp; limit: ONNX models"),
        (
            {"model": nn.Linear(4, 4).eval(), "example_inputs": (torch.zeros(2, 4).half(),)},
            "linear: found linear of input float16, p_weight float32, p_bias float32; limit: one "
            "type for all operands of a product, as where torch runs it. Instead: convert the exa",
        ),
        (
            {
                "model": nn.Conv2d(4, 4, 1, bias=False).eval(),
                "example_inputs": (torch.zeros(1, 4, 2, 2).half(),),
            },
            "conv2d: found conv2d of input float16, p_weight float32",
        ),
        (
            {
                "model": torch.export.export(nn.Softmax(-1), (torch.zeros(2, 4),)),
                "example_inputs": (torch.zeros(2, 4).half(),),
            },
            "example_inputs: found 1 of them for a ExportedProgram; limit: those of a module of to",
        ),
        ({"model": relax_model(), "example_inputs": (1, 2)}, "found 2 of them for a IRModule"),
        ({"model": Mlp(), "runs_on": "cpu"}, "runs_on: found 'cpu'; limit: 'cuda' or 'llvm'"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(RefusedError, match=text):
        compile_model(**arguments)


def test_who_looks_for_relay_is_told() -> None:
    with pytest.raises(AttributeError, match="Relay was removed from TVM; crossfuse takes Relax"):
        crossfuse.relay  # noqa: B018
    assert not hasattr(crossfuse, "relay")


def test_onnx_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(RefusedError, match=r"no such package.*pip install 'crossfuse\[onnx\]'"):
        read_model("model.onnx")
