"""`compile_bins`: kernels for each bin of M, packed, loaded and emulated."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import crossfuse
from crossfuse.compiler.bins import CompiledBins, compile_bins
from crossfuse.emulate.cuda import emulate
from crossfuse.errors import (
    ArtefactRefused,
    LoweringRefused,
    RefusedError,
    ScheduleRefused,
)
from crossfuse.runtime.dispatch_table import TABLE
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import check, gated_ffn_module, parse, prim_func, random_inputs

SPEC = parse("gated_ffn:M=7,K=64,N=256,L=64,dtype=bfloat16,residual=out")
BINS = (16, 70)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CompiledBins:
    folder = tmp_path_factory.mktemp("bins")
    return compile_bins(SPEC, bins=BINS, placement={16: "dsm", 70: "l2"}, directory=folder)


def test_the_folder_has_a_library_for_each_bin(compiled: CompiledBins) -> None:
    assert sorted(each.name for each in compiled.folder.iterdir()) == [
        *(TABLE, "main_16.json", "main_16.so", "main_70.json", "main_70.so"),
    ]
    assert compiled.table.rows == BINS
    assert compiled.table.metadata == {
        "source": str(SPEC),
        "placement": {"16": "dsm", "70": "l2"},
    }
    images = [each.lowered.image for each in compiled.bins.values()]
    assert [each.launches[0].cooperative for each in images] == [False, True]
    assert [each.rows for each in images] == list(BINS)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 16, 17, 70, 71, 150])
def test_the_chosen_kernels_compute_the_rows(compiled: CompiledBins, rows: int) -> None:
    """What a call of so many rows launches, emulated piece by piece."""
    spec = replace(SPEC, M=rows)
    inputs = dict(random_inputs(spec))
    for piece in compiled.table.pieces(rows):
        part = slice(piece.first, piece.first + piece.rows)
        image = compiled.bins[BINS[piece.bin]].lowered.image
        by_row = {each.name for each in image.buffers if each.rows}
        views = {key: x[part] if key in by_row else x for key, x in inputs.items()}
        report = emulate(image, views, orders=1)
        report.raise_if_wrong()
        check(replace(SPEC, M=piece.rows), views, report.outputs["out"])


def test_a_folder_is_loaded_anywhere(compiled: CompiledBins, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(compiled.folder, copy)
    dispatch = crossfuse.load_dispatch(copy, check_device=False)
    assert dispatch.table == compiled.table
    assert [each.name for each in dispatch.kernels] == ["main_16", "main_70"]
    assert [each.shape[0] for each in dispatch.buffers if each.rows] == [70, 70, 70]
    (copy / "main_16.so").write_bytes((copy / "main_70.so").read_bytes())
    with pytest.raises(ArtefactRefused, match=r"found a file of hash .*as its \.json says"):
        crossfuse.load_dispatch(copy)


@pytest.mark.slow
def test_schedules_of_a_plan(tmp_path: Path) -> None:
    def schedule(spec: Any) -> Any:
        return schedule_tiled_ffn(prim_func(spec), first=TensorTiles(columns=32))

    found = compile_bins(SPEC, bins=(8,), schedule=schedule, directory=tmp_path, name="plan")
    assert found.table.metadata["placement"] == "schedule"
    assert (tmp_path / "plan_8.so").is_file()
    assert found.bins[8].lowered.image.rows == 8


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"source": "C1"}, "source: found a ConvChainSpec; limit: a workload of kind gated_ffn"),
        ({"bins": ()}, "bins: found (); limit: different positive numbers."),
        ({"bins": (16, 16)}, "bins: found (16, 16); limit: different positive numbers."),
        ({"bins": (0,)}, "bins: found (0,); limit: different positive numbers."),
        ({"placement": {3: "l2"}}, "placement: found one for 3 rows; limit: bins of (16, 70) rows"),
    ],
)
def test_what_has_no_bins(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(RefusedError) as caught:
        compile_bins(**({"source": SPEC, "bins": BINS} | arguments))
    assert str(caught.value).startswith(f"compile_bins: {text}")


def test_the_general_lowering_has_all_rows() -> None:
    with pytest.raises(RefusedError) as caught:
        crossfuse.compile("gemm:M=16,K=64,N=64", rule="threads", fewer_rows=True)
    assert isinstance(caught.value, LoweringRefused)
    assert "found a schedule of the general lowering; limit: kernels of the Hopper" in str(
        caught.value
    )


def test_a_model_has_all_rows() -> None:
    torch = pytest.importorskip("torch")
    module, x = gated_ffn_module(64, 128, "bfloat16"), torch.zeros(8, 64, dtype=torch.bfloat16)
    with pytest.raises(ScheduleRefused, match=r"fewer_rows: found .* a model has the shapes of"):
        crossfuse.compile(module, example_inputs=(x,), fewer_rows=True)
