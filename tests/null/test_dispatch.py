"""Dispatch over M without a compiler: the table, the choice of a bin, files that do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossfuse.errors import ArtefactRefused
from crossfuse.lower.image import ROW_COUNT, BufferSpec, KernelImage, Launch, TensorMap
from crossfuse.runtime.artefact import Artefact
from crossfuse.runtime.dispatch_table import TABLE, Bin, DispatchTable
from crossfuse.runtime.kernel_table import Dispatch, load_dispatch, write_dispatch
from crossfuse.runtime.manifest import FORMAT_VERSION, Manifest

AGAIN = "Instead: build the bins again, or copy the whole folder."
BINS = (16, 64, 128)


def buffers(rows: int, columns: int = 8) -> tuple[BufferSpec, ...]:
    return (
        BufferSpec("A", (rows, columns), "float32", False, rows=True),
        BufferSpec("B", (columns, columns), "float32", False),
        BufferSpec("scale", (rows,), "float32", False, rows=True),
        BufferSpec("out", (rows, columns), "float32", True, rows=True),
    )


def manifest(rows: int, **changes: Any) -> Manifest:
    plain = Manifest(
        format_version=FORMAT_VERSION,
        name=f"main_{rows}",
        device="nvidia-h100",
        arch="sm_90a",
        versions={},
        limits={},
        buffers=buffers(rows),
        launches=(),
        resources=(),
        cuda_sha256="",
        cubin_sha256="",
        metadata={},
        trace=None,
    )
    return replace(plain, **changes)


class Recorder:
    """In the place of a loaded kernel: adds 1 to its rows and writes down how many there were."""

    def __init__(self, rows: int, log: list[tuple[int, int]], **changes: Any) -> None:
        self.manifest = manifest(rows, **changes)
        self.buffers = self.manifest.buffers
        self.rows = rows
        self.log = log

    def __call__(self, a: Any, b: Any, scale: Any, out: Any, device: int = 0) -> None:
        assert len(a) == len(scale) == len(out) <= self.rows
        assert b.shape == (8, 8)
        self.log.append((self.rows, len(a)))
        out[:] = a + scale[:, None]


def table(*rows: int) -> DispatchTable:
    return DispatchTable("ffn", tuple(Bin(each, f"main_{each}.so", "") for each in rows), {})


def dispatch(log: list[tuple[int, int]]) -> Any:
    return Dispatch(table(*BINS), [Recorder(each, log) for each in BINS])  # type: ignore[arg-type]


def refusal(action: Any) -> str:
    with pytest.raises(ArtefactRefused) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize(
    ("rows", "pieces"),
    [
        (0, []),
        (1, [(0, 1, 16)]),
        (16, [(0, 16, 16)]),
        (17, [(0, 17, 64)]),
        (64, [(0, 64, 64)]),
        (128, [(0, 128, 128)]),
        (129, [(0, 128, 128), (128, 1, 16)]),
        (300, [(0, 128, 128), (128, 128, 128), (256, 44, 64)]),
        (384, [(0, 128, 128), (128, 128, 128), (256, 128, 128)]),
    ],
)
def test_the_smallest_bin_that_holds_the_rows(
    rows: int, pieces: list[tuple[int, int, int]]
) -> None:
    found = table(*BINS).pieces(rows)
    assert [(each.first, each.rows, BINS[each.bin]) for each in found] == pieces


@pytest.mark.parametrize("bins", [(1,), (3, 5), (16, 64, 128, 256, 512)])
def test_pieces_are_all_rows_in_order(bins: tuple[int, ...]) -> None:
    for rows in range(3 * bins[-1] + 2):
        next_row = 0
        for piece in table(*bins).pieces(rows):
            assert piece.first == next_row
            below = (0, *bins)[piece.bin]
            assert below < piece.rows <= bins[piece.bin]
            next_row += piece.rows
        assert next_row == rows


@pytest.mark.parametrize("rows", [1, 16, 17, 128, 129, 300])
def test_calls(rows: int) -> None:
    log: list[tuple[int, int]] = []
    a = np.arange(rows * 8, dtype=np.float32).reshape(rows, 8)
    b, scale = np.zeros((8, 8), np.float32), np.arange(rows, dtype=np.float32)
    out = dispatch(log).run(a, b, scale)
    assert out.shape == (rows, 8)
    assert np.array_equal(out, a + scale[:, None])
    assert log == [(BINS[each.bin], each.rows) for each in table(*BINS).pieces(rows)]


def test_no_rows_launch_nothing() -> None:
    log: list[tuple[int, int]] = []
    empty = np.zeros((0, 8), np.float32)
    out = dispatch(log).run(empty, np.zeros((8, 8), np.float32), np.zeros(0, np.float32))
    assert (out.shape, log) == ((0, 8), [])


def test_arguments_that_do_not_fit() -> None:
    kernels = dispatch([])
    a, b = np.zeros((130, 8), np.float32), np.zeros((8, 8), np.float32)
    assert refusal(lambda: kernels(a, b, np.zeros(129, np.float32), a)) == (
        "argument-rows: dispatch of ffn: found 'scale' of shape (129,); limit: 130 rows, as the "
        "first tensor has. Instead: pass tensors of equally many rows."
    )
    assert refusal(lambda: kernels(3)) == (
        "argument-count: dispatch of ffn: found 1 arguments, none of them a tensor with rows; "
        "limit: 4 tensors (A, B, scale, out). Instead: pass the inputs and the outputs, in this "
        "order."
    )
    assert refusal(lambda: kernels.run(a, b)) == (
        "argument-count: run of ffn: found 2 inputs; limit: 3 (A, B, scale). Instead: pass the "
        "inputs alone, or call the kernel itself with its outputs."
    )
    assert refusal(lambda: table(4).pieces(-1)).startswith("dispatch-rows: ffn: found -1 rows;")


@pytest.mark.parametrize("bins", [(), (64, 16), (16, 16), (0, 4), (1.5,)])
def test_bins_out_of_order(bins: tuple[int, ...]) -> None:
    assert refusal(lambda: table(*bins)) == (
        f"dispatch-table: ffn: found bins of {list(bins)} rows; limit: at least one, and each of "
        f"more rows than before. {AGAIN}"
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"buffers": tuple(replace(each, rows=False) for each in buffers(64))},
            "found kernels of all rows; limit: kernels for at most 64 rows.",
        ),
        ({"buffers": buffers(32)}, "found kernels for at most 32 rows; limit: kernels for at most"),
        (
            {"buffers": buffers(64, columns=16)},
            "found (A[1, 16] float32, B[16, 16] float32, scale[1] float32, out[1, 16] float32) on "
            "sm_90a; limit: (A[1, 8] float32, B[8, 8] float32, scale[1] float32, out[1, 8] "
            "float32) on sm_90a, as main_16.so has them.",
        ),
        ({"arch": "sm_100a"}, "on sm_100a; limit: (A[1, 8]"),
    ],
)
def test_kernels_that_do_not_belong_together(changes: dict[str, Any], text: str) -> None:
    kernels: list[Any] = [Recorder(16, []), Recorder(64, [], **changes)]
    found = refusal(lambda: Dispatch(table(16, 64), kernels))
    assert found.startswith("dispatch-table: main_64.so: ")
    assert text in found
    assert found.endswith(AGAIN)


# Files


def artefact(folder: Path, rows: int) -> Artefact:
    library, path = folder / f"main_{rows}.so", folder / f"main_{rows}.json"
    library.write_bytes(b"library")
    path.write_text(manifest(rows).to_json())
    return Artefact(library, path, manifest(rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # The order of the mapping does not matter.
    artefacts = {each: artefact(tmp_path, each) for each in reversed(BINS)}
    write_dispatch(tmp_path, "ffn", artefacts, {"source": "S3", "placement": {16: "dsm"}})
    return tmp_path


def test_the_table_is_read_as_it_was_written(folder: Path) -> None:
    text = (folder / TABLE).read_text()
    found = DispatchTable.from_json(text, "here")
    assert found.rows == BINS
    assert [each.shared_object for each in found.bins] == [
        "main_16.so",
        "main_64.so",
        "main_128.so",
    ]
    assert found.metadata == {"source": "S3", "placement": {"16": "dsm"}}
    assert found.to_json() == text


def test_a_library_of_another_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    strange = {16: artefact(elsewhere, 16)}
    assert refusal(lambda: write_dispatch(folder, "ffn", strange)).startswith(
        f"dispatch-table: ffn: found a library in {elsewhere}; limit: {folder}."
    )
    with pytest.raises(ArtefactRefused, match="JSON values"):
        write_dispatch(elsewhere, "ffn", strange, {"plan": object()})
    assert not (elsewhere / TABLE).exists()


def changed(folder: Path, **fields: Any) -> None:
    record = json.loads((folder / TABLE).read_text())
    (folder / TABLE).write_text(json.dumps(record | fields))


DAMAGES: dict[str, tuple[Any, str]] = {
    "no table": (lambda f: (f / TABLE).unlink(), "found no such file or directory; limit: a tab"),
    "no JSON": (lambda f: (f / TABLE).write_text("{"), "at line 1, column 2; limit: JSON."),
    "no object": (
        lambda f: (f / TABLE).write_text("[]"),
        "found a list of 0 entries; limit: a JSON",
    ),
    "another version": (
        lambda f: changed(f, format_version=9),
        "found format version 9; limit: format version 1.",
    ),
    "no bins": (lambda f: changed(f, bins=[]), "found bins of [] rows; "),
    "a bin without a library": (
        lambda f: changed(f, bins=[{"rows": 4}]),
        "found bins[0].shared_object: nothing; limit: all fields.",
    ),
    "a flag for a number": (
        lambda f: changed(f, bins=[{"rows": True, "shared_object": "x.so", "manifest_sha256": ""}]),
        "found bins[0].rows: true; limit: a whole number.",
    ),
    "a library of another folder": (
        lambda f: changed(f, bins=[{"rows": 4, "shared_object": "../x.so", "manifest_sha256": ""}]),
        "found bins[0].shared_object: '../x.so'; limit: the name of a file in the folder.",
    ),
    "another manifest": (
        lambda f: (f / "main_64.json").write_text(manifest(64, trace="other").to_json()),
        f"as in {TABLE}.",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_not_loaded(folder: Path, name: str) -> None:
    damage, text = DAMAGES[name]
    damage(folder)
    found = refusal(lambda: load_dispatch(folder))
    assert found.startswith("dispatch-table: ")
    assert text in found
    assert found.endswith(AGAIN)


def test_files_that_are_not_whole(folder: Path) -> None:
    """A missing file is named, and a library is compared with its manifest."""
    found = refusal(lambda: load_dispatch(folder))
    assert found.startswith(f"manifest: {folder / 'main_16.so'}: found a file of hash ")
    (folder / "main_16.json").unlink()
    assert refusal(lambda: load_dispatch(folder)).startswith(
        f"artefact-file: {folder / 'main_16.json'}: found no such file or directory;"
    )


# Images


def test_images_of_fewer_rows() -> None:
    maps = tuple(
        TensorMap(f"{name}_map", name, (8, 64), (32,), (8, 64), 0) for name in ("A", "B", "W")
    )
    launch = Launch("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, ("A_map", ROW_COUNT), maps)
    space = (BufferSpec("W", (64, 8), "float32", True),)
    image = KernelImage("main", "", buffers(64), (launch,), space)
    assert image.rows == 64
    cut = image.with_rows(5)
    assert cut.rows == 5
    assert [each.shape for each in cut.memory] == [(5, 8), (8, 8), (5,), (5, 8), (64, 8)]
    assert [each.extents for each in cut.launches[0].tensor_maps] == [(8, 5), (8, 64), (8, 64)]
    fixed = replace(image, buffers=tuple(replace(each, rows=False) for each in image.buffers))
    assert fixed.rows is None
    assert fixed.with_rows(5) == fixed


def test_manifests_of_kernels_for_all_rows_have_no_such_field() -> None:
    """Those that were written before are read as they were meant."""
    record = json.loads(manifest(4).to_json())
    for each in record["buffers"]:
        del each["rows"]
    read = Manifest.from_json(json.dumps(record), "here")
    assert not any(each.rows for each in read.buffers)
