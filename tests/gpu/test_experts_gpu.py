"""Products by the weights of chosen experts on a GPU: right, and bit for bit the same each time."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cpu.schedule.test_experts import _ROUNDED, _SUMMED, Case, drawn, exact, gated, mixed
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.lower.image import starting_early
from crossfuse.runtime import load
from crossfuse.runtime.artefact import build_library
from crossfuse.schedule.rules.experts import schedule_experts
from crossfuse.workload.experts import ExpertsForm, emit_experts

torch = pytest.importorskip("torch")

REPEATS = 500
QWEN = Case(tokens=1, top=8, experts=128, columns=768, depth=2048)
FORMS = {
    "gate and up": gated(QWEN),
    "of 16 tokens": gated(Case(16, 8, 128, 768, 2048, width=128)),
    "down": mixed(Case(1, 8, 128, 2048, 768)),
    "down of 16 tokens": mixed(Case(16, 8, 128, 2048, 768, width=128)),
    "six experts": mixed(Case(3, 6, 64, 512, 1408, "float16")),
    "two of eight": gated(Case(2, 2, 8, 1024, 4096, "float16")),
    # The sizes of gpt-oss.
    "columns side by side": gated(
        Case(1, 4, 32, 2880, 2880, alternate=True, k_major=False, bias=True)
    ),
    "columns of 16 tokens": mixed(Case(16, 4, 32, 2880, 2880, k_major=False, bias=True)),
}


@pytest.mark.parametrize("name", FORMS)
def test_products_of_experts(name: str, tmp_path: Path) -> None:
    form: ExpertsForm = FORMS[name]
    given = drawn(form, scale=0.1)
    scheduled = schedule_experts(emit_experts(form)).mod["main"]
    image = lower(starting_early(scheduled, ["B"]), device()).image
    kernel = load(build_library(image, tmp_path).shared_object)
    inputs = [_tensor(given[each.name]) for each in form.operands]
    first = kernel.run(*inputs).clone()
    made, size = exact(form, given)
    off = np.abs(first.double().cpu().numpy()[:, 0] - made)
    assert (off <= _ROUNDED[form.out] * np.abs(made) + _SUMMED * size).all()
    side = torch.cuda.Stream()
    for turn in range(REPEATS):
        with torch.cuda.stream(side if turn % 2 else torch.cuda.current_stream()):
            again = kernel.run(*inputs)
        torch.cuda.synchronize()
        assert torch.equal(again.view(torch.int16), first.view(torch.int16))


def _tensor(value: np.ndarray) -> torch.Tensor:
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(value).cuda()
