"""Files of every kind, damaged in every way: refused in words, or read as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfuse.bench.job import Job, Timing
from crossfuse.errors import RefusedError
from crossfuse.files import read_arrays
from crossfuse.hardware import device
from crossfuse.meta_schedule.build import Build
from crossfuse.meta_schedule.candidate import Candidate, read_candidates
from crossfuse.meta_schedule.records import Record, append, read_records
from crossfuse.meta_schedule.tune import open_bundle
from crossfuse.planner.cascade.plan import CascadePlan, plan_cascade
from crossfuse.planner.cost import rates as calibration
from crossfuse.planner.cost.rates import rates_of_file
from crossfuse.planner.cost.terms import read as read_trees
from crossfuse.planner.plan import Plan, plan
from crossfuse.planner.tune.cost_model import CostModel
from crossfuse.runtime.dispatch_table import Bin, DispatchTable
from crossfuse.runtime.kernel_table import KernelTable, load_dispatch, load_kernels
from crossfuse.runtime.load import load
from crossfuse.runtime.model_artefact import load_model
from crossfuse.runtime.model_record import ModelArtefact, ModelInput
from crossfuse.schedule.planned import read_database
from crossfuse.schema import Damaged
from crossfuse.view.write import read_viewed
from mutations import NOTHING, damaged
from null.test_dispatch import manifest

H100 = device("nvidia-h100")
CHAIN = "gemm_chain:M=64,K=64,N=128,L=64"


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes
    ----------
    files : dict[str, bytes]
        By name; the first is damaged.
    read : Callable
        Reads them from a folder, and looks at what was read.
    """

    files: dict[str, bytes]
    read: Callable[[Path], Any]


def text(value: Any) -> bytes:
    return json.dumps(value).encode()


def _record() -> Record:
    made = Candidate.from_json({"spec": CHAIN, "family": "l2"}, "test")
    return Record(made, Build("ok"), Job(made.spec, "ours"), Timing("ok", microseconds=2.5))


def _records() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        append(path, _record())
        return path.read_bytes()


def _learned() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        CostModel().save(path)
        return path.read_bytes()


def _arrays() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "arrays.npz"
        np.savez(path, first=np.ones((4, 8), np.float32), second=np.arange(3))
        return path.read_bytes()


def _model() -> ModelArtefact:
    weights = (ModelInput("w", "float32", (64, 64)),)
    inputs = (ModelInput("x", "float16", ("m", 64)),)
    versions = {"tvm": "0"}
    return ModelArtefact(
        "nvidia-h100", "sm_90a", {}, versions, "llvm", inputs, {}, weights, True, (), "", "", ""
    )


def _explained(kind: Any, path: Path) -> str:
    return str(kind.from_json(path.read_text(encoding="utf-8", errors="replace")).explain().text())


def _bundle(folder: Path) -> Any:
    found = open_bundle(folder)
    return found.builds(), found.missing()


@cache
def kinds() -> dict[str, Kind]:
    bundle = {"format_version": 1, "target": "nvidia-h100", "job": asdict(Job("", "ours"))}
    bundle |= {"candidates": [_record().candidate.to_json()]}
    builds = text({_record().candidate.id: asdict(Build("ok"))})
    table = DispatchTable("ffn", (Bin(16, "main_16.so", "0"), Bin(64, "main_64.so", "0")), {})
    kernels = KernelTable("nvidia-h100", "sm_90a", {}, {}, {"main": "0"}, {}, {}, {})
    library = {"main.json": manifest(16).to_json().encode(), "main.so": b"\x7fELF"}
    packaged = Path(calibration.__file__).parents[1]
    rates = (packaged / "devices" / "nvidia-h100.json").read_bytes()
    trees = json.loads((packaged / "cost" / "learned" / "nvidia-h100.json").read_text())
    trees["trees"] = trees["trees"][:2]
    chain, cascade = plan(CHAIN), plan_cascade("softmax:rows=64,cols=1024")
    views = {
        f"viewed {name}": Kind(
            {"seen.json": made}, lambda f: read_viewed(f / "seen.json", H100, CHAIN)
        )
        for name, made in (
            ("plan", chain.to_json().encode()),
            ("candidate", text(bundle["candidates"])),
        )
    }
    return {
        "manifest": Kind(library, lambda f: load(f / "main.so")),
        "dispatch table": Kind({"dispatch.json": table.to_json().encode()}, load_dispatch),
        "kernel table": Kind(
            {"kernels.json": text({"format_version": 2} | vars(kernels))}, load_kernels
        ),
        "model": Kind({"model.json": _model().to_json().encode(), "model.so": b""}, load_model),
        "plan": Kind({"p": chain.to_json().encode()}, lambda f: _explained(Plan, f / "p")),
        "cascade": Kind(
            {"p": cascade.to_json().encode()}, lambda f: _explained(CascadePlan, f / "p")
        ),
        "calibration": Kind({"r.json": rates}, lambda f: rates_of_file(f / "r.json", H100)),
        "trees": Kind({"t": text(trees)}, lambda f: read_trees((f / "t").read_text("latin1"), "t")),
        "cost model": Kind({"m.json": _learned()}, lambda f: CostModel().load(f / "m.json")),
        "candidates": Kind(
            {"c.json": text(bundle["candidates"])}, lambda f: read_candidates(f / "c.json")
        ),
        "records": Kind({"r.jsonl": _records()}, lambda f: read_records(f / "r.jsonl")),
        "bundle": Kind({"bundle.json": text(bundle), "builds.json": builds}, _bundle),
        "builds": Kind({"builds.json": builds, "bundle.json": text(bundle)}, _bundle),
        "database": Kind(
            {"database_tuning_record.json": b"[0, [[], [1.0]]]\n", "database_workload.json": b""},
            read_database,
        ),
        **views,
    }


def outcome(kind: Kind, data: bytes, folder: Path) -> None:
    """Read damaged files; anything but a refusal fails."""
    first, *rest = kind.files
    (folder / first).write_bytes(data)
    for name in rest:
        (folder / name).write_bytes(kind.files[name])
    try:
        kind.read(folder)
    except RefusedError as error:
        assert len(str(error)) < 6000
        assert error.refusal.instead


@pytest.mark.parametrize("name", kinds())
@given(seed=st.integers(0, 2**32))
def test_damaged_files_are_refused_or_read(name: str, seed: int) -> None:
    kind = kinds()[name]
    data = damaged(next(iter(kind.files.values())), Random(seed))
    with TemporaryDirectory() as folder:
        outcome(kind, data, Path(folder))


@pytest.mark.parametrize("name", kinds())
def test_what_is_nothing_of_the_kind(name: str, tmp_path: Path) -> None:
    for data in NOTHING:
        outcome(kinds()[name], data, tmp_path)


@pytest.mark.parametrize(
    "name", [each for each in kinds() if each not in ("trees", "plan", "cascade")]
)
def test_a_folder_where_a_file_is_to_be(name: str, tmp_path: Path) -> None:
    kind = kinds()[name]
    for each in kind.files:
        (tmp_path / each).mkdir()
    if name == "records":
        assert "a folder" in read_records(tmp_path / "r.jsonl").broken[0]
        return
    with pytest.raises(RefusedError, match=r"a folder|no such file"):
        kind.read(tmp_path)


@given(seed=st.integers(0, 2**32))
def test_damaged_archives(seed: int) -> None:
    shapes = {"first": (4, 8)}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "arrays.npz"
        path.write_bytes(damaged(_ARRAYS, Random(seed)))
        try:
            found = read_arrays(path, ("first", "second"), shapes)
        except Damaged:
            return
        assert found["first"].shape == (4, 8)


_ARRAYS = _arrays()


def test_archives_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "arrays.npz"
    np.save(tmp_path / "one.npy", np.ones(3))
    (tmp_path / "one.npy").rename(path)
    with pytest.raises(Damaged, match="BadZipFile"):
        read_arrays(path, ("first",))
    np.savez(path, first=np.array([object()], dtype=object), second=np.ones((2, 2)))
    with pytest.raises(Damaged, match="first"):
        read_arrays(path, ("first",))
    with pytest.raises(Damaged, match=r"second.npy of shape \[2, 2\]; expected \[3\]"):
        read_arrays(path, ("second",), {"second": (3,)})
