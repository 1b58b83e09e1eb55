"""Compiling CUDA text: instructions, resources, and the cache."""

from __future__ import annotations

import json
import subprocess
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cpu.runtime.images import cluster_sum, vector_add
from crossfuse.cache import Entry
from crossfuse.files import write_atomically
from crossfuse.runtime import ResourceUsage, cache_directory, compile_cubin, find_nvcc
from crossfuse.runtime import nvcc as compiler
from crossfuse.runtime.manifest import parse_resources
from crossfuse.schema import read, typed

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 17.304 ms
ptxas info    : Function properties for helper
    64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for helper
    64 bytes stack frame, 32 bytes spill stores, 32 bytes spill loads
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers
"""


def no_compiler(*arguments: object, **options: object) -> None:
    pytest.fail("the compiler ran where the cache should have answered")


def test_resources_are_read_from_the_log() -> None:
    assert parse_resources(LOG) == (
        ResourceUsage("first", 168, 8, 12, 1024, 16, 1),
        ResourceUsage("second", 16, 0, 0, 0, 0, 0),
    )


def test_remarks_on_wgmma_go_to_the_kernel_that_they_name() -> None:
    remark = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    remark += "serialized due to an ill formed pipeline stage in the function 'first'\n"
    first, second = parse_resources(remark + remark + LOG)
    assert (first.advisories, second.advisories) == (("C7510",), ())
    assert first.complaints == ("20 bytes spilled", "ptxas C7510")
    assert first.summary == "168 registers, 20 bytes spilled, ptxas C7510"
    assert second.summary == "16 registers, no spills"


def test_remarks_that_name_no_kernel_go_to_all() -> None:
    for usage in parse_resources("ptxas info : (C7512) Potential Performance Loss\n" + LOG):
        assert usage.advisories == ("C7512",)


def test_resources_survive_json() -> None:
    usage = replace(parse_resources(LOG)[0], advisories=("C7510",))
    assert read(ResourceUsage, json.dumps(asdict(usage))) == usage
    old = {key: value for key, value in asdict(usage).items() if key != "advisories"}
    assert typed(ResourceUsage, old) == replace(usage, advisories=())


def test_resources_of_a_compiled_kernel() -> None:
    text = 'extern "C" __global__ void k(float* x) { __shared__ float s[256]; s[threadIdx.x] = '
    text += "x[0]; __syncthreads(); x[threadIdx.x] = s[255 - threadIdx.x]; }"
    compiled = compile_cubin(text, cache=False)
    assert compiled.data[:4] == b"\x7fELF"
    assert compiled.nvcc_version == find_nvcc().version
    usage = compiled.usage("k")
    assert usage is not None
    assert (usage.static_shared_bytes, usage.barriers, usage.spill_store_bytes) == (1024, 1, 0)
    assert 0 < usage.registers <= 32
    assert compiled.usage("absent") is None


def test_dsm_helpers_become_cluster_instructions(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(cluster_sum(4).cuda)
    nvcc = find_nvcc()
    command = [nvcc.path, "-std=c++17", "-arch=compute_90a", "-ptx", source, "-o", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for instruction in (
        "mapa.shared::cluster.u32",
        "ld.shared::cluster.u32",
        "barrier.cluster.arrive.release.aligned",
        "barrier.cluster.wait.acquire.aligned",
    ):
        assert instruction in done.stdout
    assert compile_cubin(cluster_sum(4).cuda).usage("sum_kernel") is not None


def test_a_second_compilation_is_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = vector_add().cuda
    first = compile_cubin(text, cache=tmp_path)
    (entry,) = tmp_path.glob("*.cubin")
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", no_compiler)
        assert compile_cubin(text, cache=tmp_path) == first
    entry.write_bytes(entry.read_bytes()[:-1])  # half of a file, as after a full disk
    again = compile_cubin(text, cache=tmp_path)
    assert (again.data, again.resources) == (first.data, first.resources)
    assert list(tmp_path.iterdir()) == [entry]


def test_another_text_flag_or_compiler_is_another_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_compile", lambda *_: Entry(b"\x7fELF", {"log": ""}))
    nvcc = find_nvcc()
    compile_cubin("text", nvcc=nvcc, cache=tmp_path)
    compile_cubin("text ", nvcc=nvcc, cache=tmp_path)
    compile_cubin("text", nvcc=nvcc, arch="sm_100a", cache=tmp_path)
    compile_cubin("text", nvcc=replace(nvcc, version="99.0.0"), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_the_cache_can_be_off_or_unwritable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_compile", lambda *_: Entry(b"\x7fELF", {"log": ""}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_cubin("text", cache=False)
    assert not cache_directory().exists()
    compile_cubin("text")
    assert len(list(cache_directory().iterdir())) == 1
    blocked = tmp_path / "file"
    blocked.touch()
    assert compile_cubin("text", cache=blocked / "below").data == b"\x7fELF"


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    contents = [bytes([value]) * 200_000 for value in range(4)]
    write_atomically(path, contents[0])

    def write(data: bytes) -> None:
        for _ in range(20):
            write_atomically(path, data)

    threads = [threading.Thread(target=write, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]
