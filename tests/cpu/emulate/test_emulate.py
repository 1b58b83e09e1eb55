"""The call itself: arguments, compilation, cache, time limit, orders, refusals."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu.emulate.kernels import clean, image, only, ramp, reverse, statement
from crossfuse.emulate.cuda import build, emulate
from crossfuse.emulate.cuda.build import find_compiler
from crossfuse.errors import ArtefactRefused, CheckFailed, EnvironmentRefused

PAIR = [("A", (64,), "float32"), ("C", (64,), "float32")]


def test_arguments_by_name_by_position_and_with_outputs() -> None:
    a = ramp(4, 64)
    for arguments in ({"A": a}, {"C": np.zeros_like(a), "A": a}, [a], (a, np.zeros_like(a))):
        np.testing.assert_array_equal(emulate(reverse(), arguments).outputs["C"], a[:, ::-1])
    np.testing.assert_array_equal(clean(reverse(), a[:, ::-1])["C"], a)  # not contiguous


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "argument: found no array for A; limit: an array for every input"),
        ({"X": ramp(4, 64)}, "argument: found X; limit: one of A, C"),
        ([], "argument: found 0 arrays; limit: 1 inputs, or all 2 buffers"),
        ([ramp(64)], r"A: found shape \(64,\) of float32; limit: shape \(4, 64\) of float32"),
        ([ramp(4, 64).astype("float64")], r"A: found shape \(4, 64\) of float64"),
    ],
)
def test_misfitting_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(ArtefactRefused, match=f"emulate-argument: {message}"):
        emulate(reverse(), arguments)


def test_contradicting_images() -> None:
    right = reverse()
    launch = right.launches[0]
    cases = {
        "no launch": replace(right, launches=()),
        "with argument X": replace(right, launches=(replace(launch, arguments=("X", "C")),)),
        r"with grid \(4, 1, 1\) and cluster \(3, 1, 1\)": replace(
            right, launches=(replace(launch, cluster=(3, 1, 1)),)
        ),
        "with 2048 threads": replace(right, launches=(replace(launch, block=(64, 32, 1)),)),
        "with 32 CTAs in a cluster": replace(
            right, launches=(replace(launch, grid=(32, 1, 1), cluster=(32, 1, 1)),)
        ),
        "no kernel `other`": replace(right, launches=(replace(launch, symbol="other"),)),
        "buffers A, A": replace(right, buffers=(right.buffers[0],) * 2),
    }
    for message, wrong in cases.items():
        with pytest.raises(CheckFailed, match=message):
            emulate(wrong, [ramp(4, 64)])


def test_text_that_does_not_compile() -> None:
    wrong = image("\n  C[threadIdx.x] = B[threadIdx.x];\n", PAIR)
    with pytest.raises(
        CheckFailed,
        match=r"emulate-compile: generated text of k: found line 4.*B.* was not declared",
    ):
        emulate(wrong, [ramp(64)])


def test_text_with_an_undefined_function() -> None:
    body = "\n  C[threadIdx.x] = nowhere(A[threadIdx.x]);\n"
    wrong = image(body, PAIR, preamble="float nowhere(float);")
    with pytest.raises(CheckFailed, match=r"emulate-compile.*line 4.*undefined.*nowhere"):
        emulate(wrong, [ramp(64)])


def test_unknown_inline_ptx_is_refused() -> None:
    wrong = image('\n  asm volatile("mov.u32 %0, %%clock;" : "=r"(x));\n', PAIR)
    with pytest.raises(CheckFailed, match=r"emulate-translate.*special register %clock"):
        emulate(wrong, [ramp(64)])
    wrong = image('\n  asm volatile("bar.sync 1, 64;");\n', PAIR)
    with pytest.raises(CheckFailed, match=r"emulate-compile.*line 4.*bar\.sync"):
        emulate(wrong, [ramp(64)])


def test_unknown_shared_declaration_is_refused() -> None:
    wrong = image("\n  __shared__ float scalar;\n", PAIR)
    with pytest.raises(CheckFailed, match="found line 4 `__shared__ float scalar;`"):
        emulate(wrong, [ramp(64)])


def test_report_raises_with_the_findings() -> None:
    right = reverse()
    wrong = replace(right, cuda=right.cuda.replace("__syncthreads();", ";"))
    report = emulate(wrong, [ramp(4, 64)])
    assert not report.ok and report.seconds > 0 and report.launches == 1
    with pytest.raises(
        CheckFailed, match=r"emulation: k: found \d finding\(s\): \S+ at byte \d+ of tile"
    ):
        report.raise_if_wrong()


def test_findings_are_limited() -> None:
    body = "".join(f"\n  C[{i}] = A[threadIdx.x];" for i in range(20))
    wrong = image(f"{body}\n", [("A", (64,), "float32"), ("C", (20,), "float32")])
    assert len(emulate(wrong, [ramp(64)], max_findings=5).findings) == 5
    assert len(emulate(wrong, [ramp(64)], max_findings=50).findings) == 20


@pytest.mark.slow
def test_endless_loop_ends_with_its_statement() -> None:
    body = """
  volatile float* cell = C;
  C[threadIdx.x] = A[threadIdx.x];
  if (threadIdx.x == 7) while (cell[7] < 1e30f) {}
"""
    wrong = image(body, PAIR)
    report = emulate(wrong, [ramp(64)], timeout_s=1.0)
    finding = only(report, "timeout")
    assert finding.first == statement(wrong, "while (cell[7]")
    assert not report.outputs and report.seconds < 20


def test_outputs_that_depend_on_the_order() -> None:
    """Lawful atomics, but floating point sums in the order of the threads."""
    body = """
  if (threadIdx.x == 0) C[0] = 0.0f;
  __syncthreads();
  atomicAdd(&C[0], A[threadIdx.x]);
"""
    values = (10.0 ** np.linspace(-6, 6, 64)).astype("float32")
    wrong = image(body, [("A", (64,), "float32"), ("C", (1,), "float32")])
    finding = only(emulate(wrong, [values], orders=4), "order-dependent")
    assert (
        finding.buffer == "C" and "1 elements differ between thread orders 0 and" in finding.detail
    )
    assert emulate(wrong, [values], orders=1).ok


def test_trap_is_a_crash() -> None:
    wrong = image("\n  if (threadIdx.x == 9) __trap();\n  C[threadIdx.x] = A[threadIdx.x];\n", PAIR)
    finding = only(emulate(wrong, [ramp(64)]), "crash")
    assert finding.first == statement(wrong, "__trap") and finding.thread == 9


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache that holds the compiled runtime and headers, and no kernel."""
    emulate(reverse(), [ramp(4, 64)]).raise_if_wrong()
    for pattern in ("runtime-*.o", "headers-*.gch"):
        for made in build.cache_directory().glob(pattern):
            shutil.copy2(made, tmp_path)
    return tmp_path


def test_cache_is_used_and_shared(cache: Path) -> None:
    right, a = reverse(), ramp(4, 64)
    reports: list[Any] = []
    threads = [
        threading.Thread(target=lambda: reports.append(emulate(right, [a], cache=cache)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.ok for report in reports] == [True] * 3
    kernels = list(cache.glob("kernel-*"))
    assert len(kernels) == 1 and not list(cache.glob(".*"))
    made = kernels[0].stat().st_ino
    assert emulate(right, [a], cache=cache).ok
    assert kernels[0].stat().st_ino == made


def test_cache_keeps_the_latest(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_KEEP", 2)
    for extra in range(3):
        body = f"\n  C[threadIdx.x] = A[threadIdx.x] + {extra};\n"
        emulate(image(body, PAIR), [ramp(64)], cache=cache).raise_if_wrong()
    assert len(list(cache.glob("kernel-*"))) == 2


def test_headers_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    counted = build.run

    def run(compiler: Any, flags: list[str], cwd: str) -> Any:
        calls.append(cwd)
        return counted(compiler, flags, cwd)

    monkeypatch.setattr(build, "run", run)
    headers: list[Path] = []
    compiler = find_compiler()
    threads = [
        threading.Thread(
            target=lambda: headers.append(build.precompiled_header(compiler, tmp_path))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(headers)) == 1 and len(headers) == 3 and headers[0].exists()
    assert len(calls) == 1


def test_headers_that_cannot_be_used_are_read_as_text(cache: Path) -> None:
    (header,) = cache.glob("headers-*.gch")
    header.write_bytes(b"from another compiler")
    assert emulate(reverse(), [ramp(4, 64)], cache=cache).ok
    assert header.read_bytes() == b"from another compiler"


WITH_GOLD = pytest.param(
    ("-fuse-ld=gold",),
    marks=pytest.mark.skipif(
        shutil.which("ld.gold") is None,
        reason="PATH has no ld.gold (Debian and Ubuntu: in binutils, or in binutils-gold)",
    ),
    id="gold",
)


@pytest.mark.parametrize("flags", [pytest.param((), id="default"), WITH_GOLD])
def test_either_linker(
    flags: tuple[str, ...], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "linker_flags", lambda: flags)
    right = reverse()
    assert emulate(right, [ramp(4, 64)], cache=cache).ok
    wrong = replace(right, cuda=right.cuda.replace("__syncthreads();", ";"))
    findings = emulate(wrong, [ramp(4, 64)], cache=cache).findings
    assert findings and all(each.first.startswith("line ") for each in findings)


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EnvironmentRefused, match=r"emulate-cache.*pass another directory as cache"):
        emulate(reverse(), [ramp(4, 64)], cache=blocked / "cache")


def test_cache_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(self: Any, *_: Any, **__: Any) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    with pytest.raises(EnvironmentRefused, match=r"emulate-cache: .*found FileSystem does not"):
        emulate(reverse(), [ramp(4, 64)], cache=tmp_path)


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        EnvironmentRefused, match=r"emulate-compiler: PATH: found no g\+\+.*install g\+\+"
    ):
        emulate(reverse(), [ramp(4, 64)])
