"""What tests of the torch backend begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crossfuse.emulate.cuda import build


@pytest.fixture(autouse=True)
def nothing_twice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graph computes a product of a kernel beside the kernel."""
    pytest.importorskip("torch")
    from crossfuse.torch import fuse_graph

    twice: list[str] = []
    real = fuse_graph.fuse_graph

    def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
        made = real(module, *args, **kwargs)
        left = {each.name for each in module.graph.nodes}
        fused = [each for each in made[0].report.outcomes if each.name]
        twice.extend(f"{each.name}: {one}" for each in fused for one in left & {*each.products})
        return made

    monkeypatch.setattr(fuse_graph, "fuse_graph", watched)
    yield
    assert not twice


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo has compiled nothing before, and nothing is left behind."""
    torch = pytest.importorskip("torch")
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def fresh_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None
) -> Iterator[None]:
    """The same, with caches of ours and of inductor that are empty, but for the emulator's.

    Its runtime takes longer to compile than what tests compile, and is the same for all of them.
    """
    emulators = build.cache_directory()
    monkeypatch.setattr(build, "cache_directory", lambda: emulators)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    yield
