"""Compiled models as folders: loaded in another process without compiling, refused if not whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

from crossfuse import compile_model, load_model  # noqa: E402
from crossfuse.errors import ArtefactRefused, EnvironmentRefused, RefusedError  # noqa: E402
from crossfuse.runtime import read_model_artefact  # noqa: E402
from crossfuse.runtime.model_record import MANIFEST  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]
ROWS, D, H = 8, 32, 64

ELSEWHERE = """
import sys
import numpy as np
from crossfuse import load_model
folder, inputs, result = sys.argv[1:]
np.save(result, load_model(folder)(np.load(inputs)))
assert "torch._dynamo" not in sys.modules  # nothing was traced
"""


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D)).half().eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    x = torch.zeros(ROWS, D).half()
    compile_model(mlp(), (x,), always=True, runs_on="llvm").export(found)
    return found


@pytest.mark.slow
def test_another_process_loads_it_without_compiling(folder: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((ROWS, D)).astype("float16")
    np.save(tmp_path / "x.npy", x)
    arguments = [str(folder), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    subprocess.run([sys.executable, "-c", ELSEWHERE, *arguments], check=True, env=os.environ)
    with torch.no_grad():
        due = mlp().double()(torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), due, rtol=3e-3, atol=3e-3)
    record = read_model_artefact(folder)
    assert (record.device, record.runs_on, len(record.weights)) == ("nvidia-h100", "llvm", 4)
    assert record.fused == ("crossfuse_gemm_chain",) and "gemm_chain, about" in record.report
    assert sorted(each.name for each in folder.iterdir()) == [
        "model.json",
        "model.so",
        "weights.npz",
    ]


def test_inputs_are_looked_at_as_before(folder: Path) -> None:
    with pytest.raises(RefusedError, match=r"found float16\[4, 32\]; limit: float16\[8, 32\]"):
        load_model(folder)(np.zeros((4, D), "float16"))


def test_weights_may_come_from_elsewhere(tmp_path: Path) -> None:
    module, x = mlp().bfloat16(), torch.randn(ROWS, D).bfloat16()
    fn = compile_model(module, (x,), always=True, runs_on="llvm")
    fn.export(tmp_path / "whole")
    fn.export(tmp_path / "bare", weights=False)
    assert torch.equal(load_model(tmp_path / "whole")(x), fn(x))  # bfloat16 travels as bits
    given = {
        name: 2 * torch.from_numpy(each.astype("f4")) for name, each in fn.imported.params.items()
    }
    given = {name: each.bfloat16() for name, each in given.items()}
    assert not torch.equal(load_model(tmp_path / "bare", weights=given)(x), fn(x))
    with pytest.raises(ArtefactRefused, match="found a model without its weights; limit: weights="):
        load_model(tmp_path / "bare")
    given["p_0_weight"] = given["p_0_weight"].half()
    with pytest.raises(RefusedError, match=r"p_0_weight: found float16\[64, 32\]; limit: bfloat16"):
        load_model(tmp_path / "bare", weights=given)
    del given["p_0_weight"]
    with pytest.raises(ArtefactRefused, match="found no weight 'p_0_weight'; limit: all that the"):
        load_model(tmp_path / "bare", weights=given)


def test_a_folder_that_is_written_again_is_loaded_anew(tmp_path: Path) -> None:
    x = torch.randn(ROWS, D)
    for module in (nn.ReLU(), nn.Tanh()):
        fn = compile_model(module.eval(), (x,), runs_on="llvm")
        fn.export(tmp_path)
        assert torch.equal(load_model(tmp_path)(x), fn(x))


def changed(folder: Path, home: Path, **values: Any) -> Path:
    """A copy of a folder, with some values of its record changed."""
    for each in folder.iterdir():
        (home / each.name).write_bytes(each.read_bytes())
    record = json.loads((home / MANIFEST).read_text())
    versions = record["versions"] | values.pop("versions", {})
    (home / MANIFEST).write_text(json.dumps(record | {"versions": versions} | values))
    return home


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"versions": {"tvm": "0.26.0"}},
            "found a model of apache-tvm 0.26.0; limit: 0.27.0.post",
        ),
        ({"versions": {"tvm-ffi": "0.1"}}, "found a model of apache-tvm-ffi 0.1; limit: 0.1.14.po"),
        (
            {"format_version": 0},
            "found format version 0; limit: format version 1. Instead: expo",
        ),
        ({"library_sha256": "5f"}, "model.so: found a file of hash .*; limit: 5f"),
        ({"inputs": [{}]}, "found inputs.0..name: nothing; limit: all fields"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    folder: Path, tmp_path: Path, values: dict[str, Any], text: str
) -> None:
    with pytest.raises(ArtefactRefused, match=text):
        load_model(changed(folder, tmp_path, **values))


def test_what_is_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ArtefactRefused, match="found no such file or directory; limit: a file of the m"
    ):
        load_model(tmp_path)
    home = changed(folder, tmp_path)
    whole = (home / "weights.npz").read_bytes()
    for part in (b"", b"PK", whole[: len(whole) // 2]):
        (home / "weights.npz").write_bytes(part)
        with pytest.raises(ArtefactRefused, match="limit: the weights that the record names"):
            load_model(home)


def test_a_smaller_gpu_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossfuse.runtime.model_artefact.gpu_limits", lambda: {"sms": 114})
    home = changed(folder, tmp_path, runs_on="cuda")
    with pytest.raises(ArtefactRefused, match="found a GPU of 114 multiprocessors; limit: 132, t"):
        load_model(home)
    monkeypatch.setattr("tvm.cuda", lambda: SimpleNamespace(exist=False))
    with pytest.raises(EnvironmentRefused, match="found no GPU; limit: a Hopper GPU, and a TVM wi"):
        load_model(home, check_device=False)
