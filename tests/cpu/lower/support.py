"""What the tests of the lowering share: single passes, plain comparisons, and both checkers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm

from crossfuse import _tvm as ir
from crossfuse._autoload import register
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.cuda.arguments import numpy_dtype
from crossfuse.emulate.llvm import run_sequential
from crossfuse.hardware import tvm_target
from crossfuse.lower.extract import Lowered, lower, only_function
from crossfuse.lower.image import KernelImage
from crossfuse.lower.pipeline import cluster_passes

BARRIER = "crossfuse_cluster_sync"

register()


def apply(make_pass: Callable[[], Any], func: Any) -> Any:
    """The function after one pass."""
    module = ir.IRModule({"main": only_function(func)})
    return make_pass()(module)["main"]


def after(func: Any, last: str) -> Any:
    """The function after all passes of the pipeline up to the one named `last`."""
    module = ir.IRModule({"main": only_function(func).with_attr("global_symbol", "main")})
    module = ir.tirx.transform.BindTarget(tvm_target("nvidia-h100"))(module)
    for each in cluster_passes({}):
        module = each(module)
        if each.info.name == last:
            return module["main"]
    raise AssertionError(f"no pass {last}")


def plain(func: Any) -> Any:
    """The function without access regions, device source text, and what names or places it."""

    def block(node: Any, mutator: Any) -> Any:
        return ir.block_like(mutator.default_mutate(node), reads=[], writes=[], name_hint="")

    def call(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if isinstance(node.op, ir.Op) and node.op.name == "tirx.cuda.func_call":
            name = str(node.args[0].value)
            return ir.cuda_func_call(name, *node.args[1:-1], source_code="", return_type=node.ty)
        if isinstance(node.op, ir.Op) and node.op.name == "tirx.tvm_storage_sync":
            return ir.Call(node.op, [node.args[0]], ret_ty=node.ty)
        return node

    body = ir.mutate(func.body, (ir.SBlock, block), (ir.Call, call))
    for key in [] if func.attrs is None else list(func.attrs.keys()):
        func = func.without_attr(key)
    return ir.with_body(func, body)


def assert_becomes(make_pass: Callable[[], Any], before: Any, expected: Any) -> None:
    """`before` becomes `expected` by one pass, but for what `plain` leaves out."""
    got, wanted = plain(apply(make_pass, before)), plain(only_function(expected))
    tvm.ir.assert_structural_equal(got, wanted, map_free_vars=True)


def kernels_in(text: str) -> str:
    """The definitions of kernels in a text, without helpers and declarations."""
    found = re.split(r'(?=extern "C" __global__)', text)[1:]
    return "".join(each.strip() + "\n" for each in found if "{" in each)


def steps(text: str, *marks: str) -> list[str]:
    """The order in which marks (regular expressions) occur in a text."""
    found = [(m.start(), mark) for mark in marks for m in re.finditer(mark, text)]
    return [mark for _, mark in sorted(found)]


def barriers(image: KernelImage) -> int:
    """Cluster barriers in the text of the kernels."""
    return kernels_in(image.cuda).count(f"{BARRIER}();")


def inputs_of(image: KernelImage, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs for an image."""
    random = np.random.default_rng(seed)
    return {
        each.name: (random.standard_normal(each.shape) * 4).astype(numpy_dtype(each.dtype))
        for each in image.buffers
        if not each.output
    }


def checked(func: Any, *, tolerance: float = 0.0, **options: Any) -> Lowered:
    """Lower a function and require that its emulation is clean and gives the sequential result."""
    lowered = lower(func, **options)
    inputs = inputs_of(lowered.image)
    report = emulate(lowered.image, inputs)
    assert report.ok, "\n".join(map(str, report.findings))
    assert_same(report.outputs, run_sequential(func, inputs).outputs, tolerance)
    return lowered


def assert_same(
    got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], tolerance: float
) -> None:
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        if tolerance == 0.0:
            assert got[name].tobytes() == value.tobytes(), name
        else:
            np.testing.assert_allclose(
                got[name].astype("float64"),
                value.astype("float64"),
                tolerance,
                tolerance,
                True,
                name,
            )


def is_wrong(image: KernelImage, expected: Mapping[str, np.ndarray], seed: int = 0) -> bool:
    """Whether the emulator reports a finding, or the outputs differ."""
    report = emulate(image, inputs_of(image, seed), timeout_s=60.0)
    if not report.ok:
        return True
    return any(
        report.outputs[name].tobytes() != value.tobytes() for name, value in expected.items()
    )
