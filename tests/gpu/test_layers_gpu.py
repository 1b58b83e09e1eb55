"""Rows of layers on a GPU, in one kernel or one each: equal runs, the numeric rule."""

from __future__ import annotations

from pathlib import Path

import pytest

import crossfuse
from crossfuse.emulate.llvm import draw, limits, parameters
from crossfuse.workload import parse_layers, prim_func
from crossfuse.workload.tolerances import judge

pytest.importorskip("torch")

REPEATS = 100
TEXTS = [
    "layers:M=16,widths=512x1024x1024x512",
    "layers:M=128,widths=768x3072x3072x768,act=gelu,bias=true",
    "layers:M=33,widths=264x136x520x72x264,dtype=float16,residual=true",
]


@pytest.mark.parametrize("family", ["phases", "launches"])
@pytest.mark.parametrize("text", TEXTS)
def test_layers_are_right_and_repeat(text: str, family: str, tmp_path: Path) -> None:
    plan = crossfuse.plan(text, only=(family,))
    kernel = crossfuse.compile(text, plan=plan, directory=tmp_path).kernel
    func = prim_func(parse_layers(text))
    inputs = draw(parameters(func))
    first = kernel.run(*inputs.values())
    judge(limits(func, inputs), first, text)
    for _ in range(REPEATS - 1):
        assert kernel.run(*inputs.values()).tobytes() == first.tobytes()
