"""Examples in docstrings of what studies share run."""

from __future__ import annotations

import doctest

import pytest

from study.dataflow import movement, search


@pytest.mark.parametrize("module", [movement, search], ids=lambda each: each.__name__)
def test_examples_run(module) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed
