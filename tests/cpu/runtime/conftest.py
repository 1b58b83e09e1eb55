"""Libraries that several tests of the runtime read."""

from __future__ import annotations

import pytest

from cpu.runtime.images import vector_add
from crossfuse.runtime import Artefact, build_library


@pytest.fixture(scope="session")
def added(tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    """A library of vector_add with metadata and a trace."""
    return build_library(
        vector_add(),
        tmp_path_factory.mktemp("added"),
        metadata={"plan": {"tile": [1, 128]}, "source_sha256": "00ff"},
        schedule_trace="b0 = sch.get_sblock('C')",
    )
