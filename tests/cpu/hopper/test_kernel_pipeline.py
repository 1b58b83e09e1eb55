"""The pipeline of kernels is TVM's own, but for what keeps its passes right."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from crossfuse.hardware import device, tvm_target
from crossfuse.lower.pipeline import kernel_pipeline


@T.prim_func
def empty(a: T.handle) -> None:
    A = T.match_buffer(a, (128,), "float32")
    for i in T.thread_binding(128, "threadIdx.x"):
        A[i] = 0.0


def names(pipeline: Any) -> list[str]:
    found: list[str] = []

    @tvm.ir.instrument.pass_instrument
    class Names:
        def run_after_pass(self, _mod: Any, info: Any) -> None:
            found.append(str(info.name))

    bound = tvm.tirx.transform.BindTarget(tvm_target(device("nvidia-h100")))
    module = bound(tvm.IRModule({"main": empty.with_attr("global_symbol", "main")}))
    with tvm.transform.PassContext(instruments=[Names()]):
        pipeline(module)
    return [each for each in found if each not in ("sequential", "_pipeline")]


def test_the_passes_are_those_of_tvm() -> None:
    theirs, _, _ = tvm.tirx.get_tir_pipeline("tirx")
    ours = names(kernel_pipeline())
    own = [each for each in ours if each.startswith("crossfuse.")]
    assert own == [
        "crossfuse.HideIndices",
        "crossfuse.ShowIndices",
        "crossfuse.PackRegisters",
        "crossfuse.RoundTowardsZero",
    ]
    assert [each for each in ours if each not in own] == names(theirs)
