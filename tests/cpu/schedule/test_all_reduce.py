"""A sum over GPUs: what its kernels compute, in how many CTAs, and planted faults."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from crossfuse.emulate.cuda import drop_call, emulate_ranks
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import WorkloadRefused
from crossfuse.lower.extract import lower
from crossfuse.schedule.rules.ranks import schedule_all_reduce
from crossfuse.workload import all_reduce

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def operands(ranks: int, elements: int, dtype: str) -> np.ndarray:
    """Some values cancel but for the last bits."""
    made = np.random.default_rng(0).uniform(-1, 1, (ranks, elements)).astype(TYPES[dtype])
    made[-1, ::7] = -made[0, ::7]
    return made


def summed(given: np.ndarray) -> np.ndarray:
    """Float32 sums in the order of ranks, rounded once."""
    total = np.zeros(given.shape[1:], "float32")
    for each in given:
        total = total + each.astype("float32")
    return np.broadcast_to(total.astype(given.dtype), given.shape)


@pytest.mark.parametrize(
    ("ranks", "elements", "dtype"),
    [(2, 2048, "bfloat16"), (2, 520, "float16"), (3, 129, "float32"), (8, 1024, "bfloat16")],
)
def test_all_ranks_get_the_same_sum(ranks: int, elements: int, dtype: str) -> None:
    func = all_reduce(elements=elements, ranks=ranks, dtype=dtype)
    given = operands(ranks, elements, dtype)
    sch = schedule_all_reduce(func)
    sequential = run_sequential(sch, {"A": given}).outputs["out"]
    assert np.asarray(sequential).tobytes() == summed(given).tobytes()
    report = emulate_ranks(lower(sch).image, {"A": given}, calls=2)
    report.raise_if_wrong()
    assert np.asarray(report.outputs["out"]).tobytes() == summed(given).tobytes()


@pytest.mark.parametrize(
    ("kilo", "ctas", "threads"), [(4, 2, 256), (64, 16, 512), (256, 64, 512), (1024, 128, 1024)]
)
def test_few_ctas_are_counted(kilo: int, ctas: int, threads: int) -> None:
    image = lower(schedule_all_reduce(all_reduce(elements=kilo << 10, ranks=2))).image
    assert [(each.grid[0], each.block[0]) for each in image.launches] == [(ctas, threads)] * 2
    # Peers' memory is loaded 16 bytes at a time.
    assert image.cuda.count("*(uint4*)(A_global_peer_ptr") == 3


@pytest.mark.parametrize(("call", "kernel"), [("await", 0), ("await", 1), ("arrive_at", 0)])
def test_faults_are_found(call: str, kernel: int) -> None:
    image = lower(schedule_all_reduce(all_reduce(elements=512, ranks=2))).image
    faulty = drop_call(image, f"crossfuse_{call}_ranks", kernel)
    report = emulate_ranks(faulty, {"A": operands(2, 512, "bfloat16")}, calls=2, timeout_s=30)
    assert "race" in {each.kind for each in report.findings}


def test_other_types_are_refused() -> None:
    with pytest.raises(WorkloadRefused) as caught:
        all_reduce(elements=64, ranks=2, dtype="int32")
    assert str(caught.value) == (
        "all-reduce: sum over GPUs: found element type int32; limit: float16, bfloat16, float32. "
        "Instead: convert the operands."
    )
