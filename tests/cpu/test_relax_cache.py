"""A second start: groups, plans, schedules and libraries come from the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import relax

from crossfuse.cache import kept
from crossfuse.hardware import device
from crossfuse.markers import ROWS
from crossfuse.relax import BuildKernels, FuseCascades, FuseChains, build_kernels, fuse_cascades
from crossfuse.relax.chains import kernels, kinds
from crossfuse.relax.chains.groups import find_chains
from crossfuse.relax.graph import read_graph
from crossfuse.runtime import artefact

pytestmark = pytest.mark.cpu

M, K, N = 16, 64, 128
SHAPES = {"x": (M, K), "b": (K, N), "d": (N, K)}


def model() -> Any:
    """Two layers, and a softmax."""
    given = [relax.Var(n, relax.TensorType(s, "float16")) for n, s in SHAPES.items()]
    op, builder = relax.op, relax.BlockBuilder()
    with builder.function("main", given):
        with builder.dataflow():
            x, b, d = given
            y = builder.emit(op.matmul(op.nn.relu(op.matmul(x, b)), d))
            out = builder.emit_output(op.nn.softmax(y, -1))
        builder.emit_func_output(out)
    return builder.get()


def start(folder: Path) -> tuple[Any, Any]:
    """What a process does: the module, and the passes that made it."""
    chains, cascades = FuseChains(always=True), FuseCascades()
    build = BuildKernels(directory=folder)
    passes = [chains, relax.transform.LegalizeOps(), cascades, build]
    made = tvm.ir.transform.Sequential(passes)(model())
    return made, (chains.outcomes, cascades.outcomes, build.kernels)


def forbid(patch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("worked out again")

    for module, name in (
        (kinds, "rank_function"),
        (kinds, "schedule_planned"),
        (kernels, "lower"),
        (fuse_cascades, "find_cascades"),
        (build_kernels, "lower"),
        (artefact, "_compiled"),
    ):
        patch.setattr(module, name, never)


@pytest.mark.slow
def test_a_second_start_works_nothing_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, (chains, cascades, libraries) = start(tmp_path / "first")
    # The first of a process that builds a kernel compiles what all launchers share.
    found = [each.kind for each in kept() if each.kind != "launcher"]
    assert {kind: found.count(kind) for kind in found} == {
        "plan": 1,
        "schedule": 1,
        "cascades": 1,
        "object": len(libraries),
        "cubin": len(libraries),
    }
    with monkeypatch.context() as patch:
        forbid(patch)
        second, again = start(tmp_path / "second")
    assert str(second.without_attr("external_mods")) == str(first.without_attr("external_mods"))
    assert again[:2] == (chains, cascades)
    assert [each.manifest for each in again[2]] == [each.manifest for each in libraries]
    for each, other in zip(again[2], libraries, strict=True):
        assert each.path.parent == tmp_path / "second"
        assert each.path.read_bytes() == other.path.read_bytes()

    damaged = next(each.path for each in kept() if each.kind == "object")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    _, (*_, mended) = start(tmp_path / "third")
    assert [each.manifest for each in mended] == [each.manifest for each in libraries]
    with monkeypatch.context() as patch:
        forbid(patch)
        start(tmp_path / "fourth")


def test_what_did_not_change_is_the_same_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mod = relax.transform.LegalizeOps()(model())
    for _ in range(2):
        made = FuseCascades()(mod)
        for variable, func in mod.functions_items():
            if "softmax" not in str(variable.name_hint) and str(variable.name_hint) != "main":
                assert made[variable].same_as(func)
    assert len(kept()) == 1


def test_modules_with_many_constants_are_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fuse_cascades, "_MOST", -1)
    assert len(FuseCascades()(relax.transform.LegalizeOps()(model())).functions) > 1
    assert kept() == ()


def test_a_schedule_for_all_rows_is_not_taken_for_one_of_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "lower", lambda *_: None)
    mod = model()
    graph = read_graph(mod["main"])
    (group,) = find_chains(graph)
    made = kernels.ChainKernels(mod, device("nvidia-h100"), True)
    planned = made.planned(graph, group, kinds.Chains())
    found = [made._kernel(planned, fewer_rows) for fewer_rows in (False, True)]
    assert [ROWS in each.body.block.annotations for each in found] == [False, True]
    assert [each.kind for each in kept()].count("schedule") == 2
