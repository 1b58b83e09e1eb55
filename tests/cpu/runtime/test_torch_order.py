"""What TVM's virtual machine launches stands between what torch's current stream does."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from crossfuse.errors import EnvironmentRefused, WorkloadRefused
from crossfuse.runtime.model_artefact import after_torch, check_first_gpu


@dataclass(eq=False)
class Stream:
    name: str
    said: list[str] = field(repr=False)

    def wait_stream(self, other: Stream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A torch with two streams, and what they were told."""
    told: list[str] = []
    side, default = Stream("side", told), Stream("default", told)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    return told


def test_the_machine_runs_between_what_a_side_stream_does(said: list[str]) -> None:
    with after_torch():
        said.append("the machine runs")
    due = ["default waits for side", "the machine runs", "side waits for default"]
    assert said == due


def test_a_stream_waits_even_if_the_machine_fails(said: list[str]) -> None:
    with pytest.raises(ValueError, match="no memory"), after_torch():
        raise ValueError("no memory")
    assert said[-1] == "side waits for default"


def test_nobody_waits_on_the_default_stream_and_without_cuda(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", torch.cuda.default_stream)
    with after_torch():
        pass
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with after_torch():
        pass
    assert said == []


def test_captures_are_refused(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    text = "captured as a CUDA graph; limit: one that runs. Instead: compile with torch.compile"
    with pytest.raises(EnvironmentRefused, match=text), after_torch():
        said.append("the machine runs")
    assert said == []


def test_other_gpus_are_refused() -> None:
    check_first_gpu(0)
    with pytest.raises(WorkloadRefused, match=r"cuda:1; limit: cuda:0.*CUDA_VISIBLE_DEVICES=1"):
        check_first_gpu(1)
