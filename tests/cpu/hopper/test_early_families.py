"""Kernels of every family start early: twice, behind one that writes all that they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from crossfuse.compiler import read_source
from crossfuse.compiler.compiled import options_of
from crossfuse.emulate.cuda import Link, chain, drop_call, emulate
from crossfuse.emulate.cuda.arguments import numpy_dtype
from crossfuse.errors import LoweringRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.image import BufferSpec, KernelImage, Launch, start_early, starting_early
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import check, parse, prim_func, random_inputs
from crossfuse.workload.cascade_numerics import random_inputs as cascade_inputs
from crossfuse.workload.cascades import resolve
from mutation_kernels import KERNELS, Kernel

pytestmark = pytest.mark.cpu

LET = 'asm volatile("griddepcontrol.launch_dependents;");'
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'


def _rows(text: str) -> Kernel:
    """Rows of the general lowering."""
    option, *_ = options_of(read_source(text), device("nvidia-h100"))
    return lower(option.make()).image, cascade_inputs(resolve(text))


FAMILIES: dict[str, Callable[[], Kernel]] = {
    **KERNELS,
    "softmax": lambda: _rows("softmax:rows=6,cols=100"),
    "softmax, long rows": lambda: _rows("softmax:rows=2,cols=40000"),
}


def writer(buffers: tuple[BufferSpec, ...]) -> KernelImage:
    """A kernel that copies inputs, each from a buffer of its name behind ``from_``."""
    body, parameters = [f"{LET} {WAIT}"], []
    for each in buffers:
        size = prod(each.shape) * numpy_dtype(each.dtype).itemsize
        word, item = ("unsigned long long", 8) if size % 8 == 0 else ("unsigned char", 1)
        parameters += [f"const {word}* from_{each.name}", f"{word}* {each.name}"]
        body.append(
            f"for (unsigned i = blockIdx.x * 32 + threadIdx.x; i < {size // item}; i += 64)"
        )
        body.append(f"  {each.name}[i] = from_{each.name}[i];")
    text = f'extern "C" __global__ void write({", ".join(parameters)}) {{\n' + "\n".join(body)
    sources = [BufferSpec(f"from_{e.name}", e.shape, e.dtype, False) for e in buffers]
    made = [BufferSpec(e.name, e.shape, e.dtype, True) for e in buffers]
    pairs = zip(sources, made, strict=True)
    names = tuple(each.name for pair in pairs for each in pair)
    launch = Launch("write", (2, 1, 1), (32, 1, 1), (1, 1, 1), 0, names, early=True)
    return KernelImage("write", f"{text}\n}}\n", (*sources, *made), (launch,))


def chained(
    image: KernelImage, inputs: Mapping[str, np.ndarray], constant: frozenset[str] = frozenset()
) -> tuple[KernelImage, dict[str, np.ndarray]]:
    """A chain of a kernel that writes all inputs but constants, and two calls; and its inputs."""
    read = tuple(each for each in image.buffers if not each.output)
    written = tuple(each for each in read if each.name not in constant)
    given = {
        each.name if each in read and each not in written else f"from_{each.name}": inputs[
            each.name
        ]
        for each in read
    }
    return chain([Link(writer(written)), Link(image), Link(image)]), given


@pytest.mark.parametrize("family", FAMILIES)
def test_it_starts_early(family: str) -> None:
    image, inputs = FAMILIES[family]()
    constant = frozenset(inputs) - {"x"} if image.launches[0].early else frozenset()
    early = start_early(image)
    assert all(each.early for each in early.launches)
    whole, given = chained(early, inputs, constant)
    helps = any(each.helps for each in image.launches)  # every second order is for late clusters
    report = emulate(whole, given, orders=3 if helps else 2, timeout_s=600)
    report.raise_if_wrong()
    assert report.at_once > 1
    alone = emulate(image, inputs, orders=1, timeout_s=600)
    alone.raise_if_wrong()
    for name, expected in alone.outputs.items():
        for run in (report.outputs, *report.later):
            assert run[name].tobytes() == expected.tobytes()


@pytest.mark.parametrize("family", ["threads", "attention", "softmax", "product"])
def test_a_missing_wait_is_found(family: str) -> None:
    image, inputs = FAMILIES[family]()
    without = drop_call(start_early(image), "crossfuse_await_kernel_before")
    text = without.cuda.replace("crossfuse_behind_wait = (void)0", "crossfuse_behind_wait = 0")
    wrong, given = chained(replace(without, cuda=text), inputs)
    found = [e for e in emulate(wrong, given, orders=1).findings if e.kind == "early-launch"]
    assert found
    assert "no griddepcontrol.wait comes before" in found[0].detail


def test_copies_of_odd_rows_are_waited_for() -> None:
    """A kernel of constant weights loads them early; of padded ones the copies are awaited."""
    text = "gemm:M=20,K=33,N=40,dtype=float16"
    spec = parse(text)
    schedule = options_of(read_source(text), device("nvidia-h100"))[0].make()
    plain, early = (lower(schedule, early=each).image for each in (False, True))
    assert [each.early for each in plain.launches] == [False, False]
    assert [each.early for each in early.launches] == [True, True]
    assert early.cuda.count("  crossfuse_await_kernel_before();") == 2
    inputs = random_inputs(spec)
    whole, given = chained(early, inputs)
    report = emulate(whole, given)
    report.raise_if_wrong()
    assert report.at_once > 1
    check(spec, inputs, report.outputs["out"])


@pytest.mark.slow
def test_the_second_of_two_kernels_loads_early_what_is_constant_alone() -> None:
    """In a call of its own all that it reads is there; behind others the kernel before may write.

    The first kernel lets the second begin at its own beginning, while the one before both still
    runs.
    """
    spec = parse("gated_ffn:M=64,K=64,N=256,L=64,dtype=bfloat16")
    func, inputs = (
        only_function(schedule_tiled_ffn(prim_func(spec), staged=False)),
        random_inputs(spec),
    )
    for constant, waits in (((), 2), (("D",), 1), (("B_gate", "B_up", "D"), 0)):
        image = lower(starting_early(func, constant)).image
        assert image.cuda.count("  crossfuse_await_kernel_before();") == waits
    image = lower(func, early=True).image
    assert image == lower(starting_early(func)).image
    whole, given = chained(image, inputs)
    report = emulate(whole, given)
    report.raise_if_wrong()
    assert report.at_once > 1
    check(spec, inputs, report.outputs["out"])


@pytest.mark.slow
def test_what_is_named_constant_is_loaded_before_the_wait() -> None:
    """As a loop says that is scheduled so; a kernel before that writes it is found."""
    spec = parse("gated_ffn:M=64,K=64,N=256,L=64,dtype=bfloat16")
    plain, told = (
        only_function(schedule_tiled_ffn(prim_func(spec), constant_weights=each))
        for each in (False, True)
    )
    image = lower(starting_early(plain, ("B_gate", "B_up", "D"))).image
    assert image == lower(told, early=True).image
    assert lower(starting_early(plain, ("B_gate", "D"))).image == lower(plain, early=True).image
    wrong, given = chained(image, random_inputs(spec), frozenset(("B_gate", "D")))
    found = {each.buffer: each for each in emulate(wrong, given).findings}
    assert [*found] == ["B_up"] and found["B_up"].kind == "early-launch"
    assert "reads what a launch before may still be writing" in found["B_up"].detail


@pytest.mark.parametrize(
    ("name", "found"), [("out", "an output"), ("X", "no parameter")], ids=["output", "unknown"]
)
def test_only_inputs_are_constant(name: str, found: str) -> None:
    spec = parse("gated_ffn:M=64,K=64,N=256,L=64,dtype=bfloat16")
    func = only_function(schedule_tiled_ffn(prim_func(spec)))
    with pytest.raises(LoweringRefused) as refused:
        lower(starting_early(func, ("D", name)))
    assert str(refused.value) == (
        f"crossfuse.early: parameter '{name}': found {found}; limit: inputs of the function "
        "(A, B_gate, B_up, D). Instead: name parameters that no kernel writes before this one is "
        "over."
    )


def test_kernels_say_so_once_and_wait_where_they_did() -> None:
    """What waits for itself gets no second wait, and is told to let the next one begin once."""
    spec = parse("gated_ffn:M=64,K=64,N=256,L=64,dtype=bfloat16")
    schedule = schedule_tiled_ffn(prim_func(spec), constant_weights=True)
    image = lower(schedule, early=True).image
    assert image.cuda.count("griddepcontrol_launch_dependents();") == 1
    assert "crossfuse_let_next_begin();" not in image.cuda
    assert "= crossfuse_await_kernel_before();" not in image.cuda
    assert image.launches == lower(schedule).image.launches
