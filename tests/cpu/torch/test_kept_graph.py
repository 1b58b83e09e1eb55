"""Programs are loaded without inductor's compiler, and as torch does it where that is needed."""

from __future__ import annotations

import dis
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not hasattr(torch.compiler, "load_compiled_function"):
    pytest.skip("torch writes no programs", allow_module_level=True)

from torch._inductor import codecache  # noqa: E402
from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels  # noqa: E402
from torch._inductor.select_algorithm import extern_kernels  # noqa: E402
from torch._inductor.triton_bundler import (  # noqa: E402
    StaticallyLaunchedAutotuner,
    TritonBundle,
)

from crossfuse.torch import Ahead, ahead, compile_ahead, inductor_artifact  # noqa: E402
from crossfuse.torch.inductor_artifact import (  # noqa: E402
    Extern,
    without_lowerings,
    written_extern,
)

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_caches")]
nn = torch.nn


def start() -> tuple[Ahead, Any]:
    """A module without kernels of anybody's; its result."""
    torch.manual_seed(0)
    # Of classes that have one name in each process.
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)).double().eval()
    x = torch.rand(4, 8).double()
    with torch.inference_mode():
        fn = compile_ahead(module, (x,))
        return fn, fn(x)


#: What another process does, told this file's folder and that of the right result.
SECOND = """
import sys
import torch
from crossfuse.torch import compile_ahead

nn = torch.nn
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)).double().eval()
x = torch.rand(4, 8).double()
want = torch.load(sys.argv[1])
with torch.inference_mode():
    fn = compile_ahead(module, (x,))
    assert fn.found and torch.equal(fn(x), want)
    heavy = ("debug", "graph", "ir", "lowering", "scheduler", "select_algorithm", "codegen.wrapper")
    print([each for each in heavy if f"torch._inductor.{each}" in sys.modules])
    with torch.autograd.profiler.profile() as profiled:
        assert torch.equal(fn(x), want)
    assert any("CompiledFxGraph" in each.name for each in profiled.function_events)
"""


def second(folder: Path) -> str:
    """Which parts of inductor's compiler another process imported, before it was profiled."""
    done = subprocess.run(
        [sys.executable, "-c", SECOND, str(folder / "want")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_another_process_imports_no_compiler(tmp_path: Path) -> None:
    first, want = start()
    assert not first.found and not first.reason
    torch.save(want, tmp_path / "want")
    assert second(tmp_path) == "[]"


@pytest.mark.slow
def test_programs_of_other_releases_are_loaded_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor_artifact, "RELEASES", ())
    first, want = start()
    assert not first.found and not first.reason
    torch.save(want, tmp_path / "want")
    assert "'lowering'" in second(tmp_path)


def test_torch_loads_what_it_is_to_say_more_of(monkeypatch: pytest.MonkeyPatch) -> None:
    _, want = start()
    loaded: list[Any] = []
    torchs = inductor_artifact.BundledCompiledForward.post_compile
    monkeypatch.setattr(
        inductor_artifact.BundledCompiledForward,
        "post_compile",
        lambda *given: loaded.append(given) or torchs(*given),
    )
    for more in (False, True):
        with monkeypatch.context() as patch:
            if more:
                patch.setenv("TORCH_TRACE", "/dev/null")
            torch.compiler.reset()
            again, found = start()
        assert again.found and torch.equal(found, want) and len(loaded) == more
        assert ahead._written(again.program)  # what was loaded is written again


HEADER = f"import torch\n{inductor_artifact._ALIGN}\n{inductor_artifact._EXTERN}\n"


@pytest.mark.parametrize(
    "code",
    [
        "import torch\n",
        HEADER + inductor_artifact._EXTERN + "\n",
        HEADER.replace("_align as align", "_align as aligned"),
        HEADER + "torch.ops.prims.inductor_seeds.default(1)\n",
        HEADER + "torch.ops.quantized_decomposed.dequantize_per_tensor(x)\n",
    ],
)
def test_code_that_is_not_as_known_stays(code: str) -> None:
    assert without_lowerings(code) is None


def test_code_calls_what_it_called() -> None:
    names = ("mm", "bias_addmm", "_linear_pointwise.binary")
    calls = "".join(f"    extern_kernels.{each}()\n" for each in names)
    # As in code for a GPU, whose comments name operators that are lowered, and not called.
    graph = "#   %y = call_function[target=torch.ops.prims.convert_element_type.default]\n"
    code = f"{HEADER}torch.ops.aten.mm\n{graph}def call():\n{calls}"
    scope: dict[str, Any] = {}
    changed = without_lowerings(code)
    assert changed is not None and changed.startswith("import torch\nfrom torch._inductor.utils ")
    assert changed.splitlines()[3:4] == code.splitlines()[3:4]  # lines are where they were
    exec(changed, scope)
    assert scope["align"] is torch._inductor.utils._align
    assert sorted(vars(scope["extern_kernels"])) == ["bias_addmm", "mm"]


@pytest.mark.parametrize("name", sorted(vars(extern_kernels)))
def test_written_functions_are_those_of_inductor(name: str) -> None:
    if "." in name:
        return  # an operator's overload, asked of the operator
    made, functions = written_extern([name])
    scope: dict[str, Any] = {}
    exec(f"import torch\n{made}\n{functions}", scope)
    known, right = vars(scope["extern_kernels"]), getattr(extern_kernels, name)
    written = known.get(name)
    assert not known or written is right or _told(written) == _told(right)
    assert known or name not in ("mm", "addmm", "bias_addmm", "bmm", "baddbmm", "convolution")


def _told(function: Any) -> list[tuple[str, str]]:
    return [(each.opname, each.argrepr) for each in dis.get_instructions(function)]


def test_other_functions_are_asked_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extern_kernels, "of_somebody", torch.sub, raising=False)
    made = Extern(mm=torch.bmm)
    assert made.mm is torch.bmm and made.of_somebody is torch.sub
    with pytest.raises(AttributeError, match="nobody"):
        _ = made.nobody


def test_functions_that_need_more_than_torch_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def annotated(x: Any) -> Any:
        return torch.neg(x)

    def around(x):  # type: ignore[no-untyped-def]
        return Path(x)

    def closed(x, *, y=torch.float32):  # type: ignore[no-untyped-def]
        return annotated(x) if y else (lambda: x)()

    def untold(x):  # type: ignore[no-untyped-def]
        return torch.neg(x)

    for value in (annotated, around, closed, untold):
        value.__module__ = "torch._inductor"
    untold.__code__ = untold.__code__.replace(co_filename="nowhere.py")
    for value in (annotated, around, closed, untold, torch.ops.prims.sin, None):
        monkeypatch.setattr(extern_kernels, "theirs", value, raising=False)
        assert written_extern(["theirs"]) == written_extern([])


@pytest.fixture
def _unhashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's hash of its files is not known, and no process may be started to compile."""

    def never(*_: Any) -> Any:
        raise AssertionError("not to be called")

    codecache.torch_key.clear()
    monkeypatch.setattr(codecache, "build_code_hash", never)
    monkeypatch.setattr(AsyncCompile, "process_pool", never)
    yield
    codecache.torch_key.clear()
    CompiledTritonKernels.cache_clear()


@pytest.mark.usefixtures("_unhashed")
@pytest.mark.parametrize("known", [b"", b"a key"])
def test_kernels_of_triton_are_found(known: bytes) -> None:
    kernel = SimpleNamespace(
        compile_results=[],
        recheck_autotune_cache=lambda **_: None,
        precompile=lambda **_: None,
        inductor_meta={},
    )
    key = codecache.code_hash("its source", extra=b"a key")
    bundle = TritonBundle([], [StaticallyLaunchedAutotuner(key, "its_name", kernel)])
    if known:
        codecache.torch_key.set(known)
    with inductor_artifact._kernels(SimpleNamespace(_triton_bundle=bundle), b"a key"):
        assert AsyncCompile().triton("its_name", "its source") is kernel
    if known:
        assert codecache.torch_key() == known
    else:
        with pytest.raises(AssertionError, match="not to be called"):
            codecache.torch_key()
    with inductor_artifact._kernels(SimpleNamespace(_triton_bundle=None), b"a key"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_cycles_are_searched_again(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    key = ahead._key
    monkeypatch.setattr(ahead, "_key", lambda *given: seen.append(gc.isenabled()) or key(*given))
    (gc.enable if enabled else gc.disable)()
    try:
        start()
        assert seen == [False] and gc.isenabled() == enabled
    finally:
        gc.enable()
