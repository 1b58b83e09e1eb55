"""Entries of the cache that are damaged, or whole and of something else: made again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tvm import relax

import crossfuse
from crossfuse import Refusal
from crossfuse.cache import Entry, Shelf, answered, kept, read_entry, root
from crossfuse.errors import PlanRefused
from crossfuse.relax import FuseCascades, FuseChains
from crossfuse.relax.build_kernels import built
from crossfuse.runtime.artefact import LIBRARIES
from mutations import NOTHING, damaged

SOFTMAX = (8, 64)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return root()


def chain() -> Any:
    """Two layers as a Relax module."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((16, 64), "float16"))
    weights = [relax.Var(f"w{n}", relax.TensorType((64, 64), "float16")) for n in range(2)]
    with builder.function("main", [x, *weights]):
        with builder.dataflow():
            inner = builder.emit(relax.op.matmul(x, weights[0]))
            out = builder.emit_output(relax.op.matmul(inner, weights[1]))
        builder.emit_func_output(out)
    return builder.get()


def softmax() -> Any:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(SOFTMAX, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.softmax(x))
        builder.emit_func_output(out)
    return relax.transform.LegalizeOps()(builder.get())


def entries(kind: str) -> list[Path]:
    return [each.path for each in kept() if each.kind == kind]


def spoilt(path: Path, entry: Entry, rng: Random) -> None:
    """Write an entry in the place of another one, with the right hash of the wrong content."""
    about: Mapping[str, Any] = entry.about
    data = entry.data
    if rng.random() < 0.5:
        data = damaged(data, rng)
    else:
        changed = damaged(json.dumps(dict(about)).encode(), rng)
        try:
            value = json.loads(changed)
        except ValueError:
            value = {}
        about = value if isinstance(value, dict) else {}
    Shelf(path.parent, path.suffix).write(path.stem, Entry(data, about))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["plan", "schedule", "cascades"])
def test_what_passes_keep(kind: str, seed: int, home: Path) -> None:
    make = FuseCascades if kind == "cascades" else FuseChains
    options = {} if kind == "cascades" else {"always": True}
    module = softmax() if kind == "cascades" else chain()
    expected = str(make(**options)(module))
    (path,) = entries(kind)
    spoilt(path, read_entry(path), Random(seed))
    assert str(make(**options)(module)) == expected


@pytest.mark.slow
def test_libraries_of_something_else(home: Path, tmp_path: Path) -> None:
    """A manifest that is whole and of another build would be refused when it is loaded."""
    func = crossfuse.compile("gemm:M=16,K=64,N=16", rule="threads", cluster=4).schedule.mod["main"]
    target = crossfuse.device("nvidia-h100")
    built(LIBRARIES, {"main": func}, target, tmp_path / "first")
    (path,) = entries("library")
    entry = read_entry(path)
    manifest = json.loads(str(entry.about["manifest"]))
    for number, changes in enumerate(
        ({"device": "nvidia-h200"}, {"versions": None}, {"buffers": []}, {"name": "../up"})
    ):
        about = dict(entry.about) | {"manifest": json.dumps(manifest | changes)}
        Shelf(path.parent, path.suffix).write(path.stem, Entry(entry.data, about))
        (made,) = built(LIBRARIES, {"main": func}, target, tmp_path / f"again{number}")
        assert crossfuse.load(made.shared_object, check_device=False).name == "main"


@pytest.mark.parametrize("data", NOTHING)
def test_refusals_that_are_none(data: bytes, tmp_path: Path) -> None:
    some = Shelf(tmp_path, ".plan")
    for about in ({"refused": "PlanRefused"}, {"refused": "sys"}, {"refused": 3}, {"refused": []}):
        some.write("key", Entry(data, about))
        assert answered(some, "key", "a plan", lambda: "text", str) == "text"
        (tmp_path / "key.plan").unlink()
    some.write("key", Entry(b"", {}))
    refusal = Refusal("rule", "where", "found", "limit", "instead")

    def refuse() -> str:
        raise PlanRefused(refusal)

    (tmp_path / "key.plan").unlink()
    for _ in range(2):
        with pytest.raises(PlanRefused, match="rule: where"):
            answered(some, "key", "a plan", refuse, str)


@pytest.mark.slow
def test_files_of_the_cache_that_are_no_entries(home: Path) -> None:
    module = chain()
    expected = str(FuseChains(always=True)(module))
    for number, data in enumerate(NOTHING):
        for each in kept():
            each.path.write_bytes(data)
        assert str(FuseChains(always=True)(module)) == expected, number
    for each in kept():
        each.path.unlink()
        each.path.mkdir()  # a folder where an entry is to be
    assert str(FuseChains(always=True)(module)) == expected
