"""What tests of the torch backend begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from crossfuse.emulate.cuda import build


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
