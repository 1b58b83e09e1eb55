"""Wrong edits of tutorials end in errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from shutil import copy

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = "found extent 32; limit: 1 to 16 CTAs in a cluster. Instead: split the loop"
DSM = "found extent 32; limit: a serial loop of extent 1 to 16, one iteration a CTA. Instead: split"
TILE = "with columns in multiples of 8 up to 256"
#: Before what it is put, the import of what removes a barrier from the text of a kernel.
PLANT = "from crossfuse.emulate.cuda import drop_call, remove_cluster_barrier\n\n"
WAIT = "tvm_builtin_cuda_mbarrier_wait"

#: Page, what stands there, the edit, and what the error says.
EDITS = {
    "1-cluster": ("01_first_cluster", "= split_k(4)", "= split_k(32)", (DSM,)),
    "1-barrier": (
        "01_first_cluster",
        "emulate_cuda(image, inputs)",
        "emulate_cuda(remove_cluster_barrier(image, 0), inputs)",
        ("uninitialised-read", "before any cluster barrier", "Instead: correct the schedule"),
    ),
    "1-tile": (
        "01_first_cluster",
        "j0, j1 = sch.split(j, [None, 32])",
        "j0, j1 = sch.split(j, [None, 33])",
        ("distinct-stores: buffer 'C'", "one thread stores each element. Instead: bind the loops"),
    ),
    "2-cluster": ("02_dsm_reduce", "exchanged(4).clus", "exchanged(32).clus", (CLUSTER,)),
    "2-barrier": (
        "02_dsm_reduce",
        "emulate_cuda(lower(schedule).image, inputs)",
        "emulate_cuda(remove_cluster_barrier(lower(schedule).image, 0), inputs)",
        ("before any cluster barrier", "Instead: correct the schedule"),
    ),
    "2-tile": (
        "02_dsm_reduce",
        "count=64",
        "count=48",
        ("found a mask within the slice of a CTA", "split it by factors that divide it"),
    ),
    "3-cluster": ("03_dsm_shuffle", "by_hand(ctas=4", "by_hand(ctas=32", (CLUSTER,)),
    "3-barrier": (
        "03_dsm_shuffle",
        "emulate_cuda(lower(sch).image, inputs)",
        "emulate_cuda(remove_cluster_barrier(lower(sch).image, 0), inputs)",
        ("no cluster barrier lies between", "Instead: correct the schedule"),
    ),
    "3-tile": (
        "03_dsm_shuffle",
        "by_hand(ctas=4",
        "by_hand(ctas=3",
        ("found 3 slices of 64 columns for 3 CTAs", "by the same number, one of 1, 2, 4, 8, 16"),
    ),
    "5-barrier": (
        "05_hopper_pipeline",
        "emulate_cuda(image, inputs)",
        f"emulate_cuda(drop_call(image, '{WAIT}', 2), inputs)",
        ("async-race", "Instead: correct the schedule"),
    ),
    "5-tile": (
        "05_hopper_pipeline",
        "scheduled(rows=64, columns=64",
        "scheduled(rows=63, columns=64",
        ("found a tile of 63 x 64", TILE, "Instead: split rows and columns by other factors"),
    ),
    "6-cluster": (
        "06_planner",
        "(1, 2, 8, 16)",
        "(1, 2, 8, 32)",
        ("max_cluster: found 32; limit: 1 to 16", "Instead: ask for less"),
    ),
    "8-cluster": (
        "08_cascades",
        "threads=64, cluster=4",
        "threads=64, cluster=32",
        ("found 32 CTAs for 1 rows; limit: 16 CTAs", "rows=1 and at most 16 CTAs"),
    ),
    "8-barrier": (
        "08_cascades",
        "emulate_cuda(lower(clustered).image, inputs)",
        "emulate_cuda(remove_cluster_barrier(lower(clustered).image, 0), inputs)",
        ("before any cluster barrier", "Instead: correct the schedule"),
    ),
    "10-cluster": (
        "10_debugging",
        "cluster=4)).image",
        "cluster=32)).image",
        ("found cluster size 32", "Instead: pass a cluster size of at most 16"),
    ),
    "10-tile": (
        "10_debugging",
        "TensorTiles(rows=128, columns=64",
        "TensorTiles(rows=128, columns=33",
        ("found a tile of 128 x 33", TILE, "Instead: split rows and columns by other factors"),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("page", "old", "new", "texts"), EDITS.values(), ids=EDITS)
def test_wrong_edit(page: str, old: str, new: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "tutorials"
    folder.mkdir()
    copy(ROOT / "tutorials" / "support.py", folder)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    text = (ROOT / "tutorials" / f"{page}.py").read_text()
    assert old in text, "the page was changed: change the edit too"
    edited = folder / f"{page}.py"
    edited.write_text(PLANT + text.replace(old, new, 1))
    done = subprocess.run(
        [sys.executable, edited],
        env={**os.environ, "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    for each in texts:
        assert each in error, error
