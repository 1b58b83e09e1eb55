"""Everything that the lowering refuses, by its text, through `lower` and through TVM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tvm
from tvm import te
from tvm.script import tirx as T

from cpu.lower import refused as r
from cpu.lower import refused_memory as m
from cpu.lower.kernels import pull, split_k, two_kernels
from cpu.macros import X
from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused
from crossfuse.hardware import device, tvm_target
from crossfuse.lower.extract import lower, only_function
from errors.lowering_cases import CASES, UNIFORM


def function_of(case: str) -> Any:
    made = CASES[case][0]
    return only_function(made if isinstance(made, ir.PrimFunc) else made())


@pytest.mark.parametrize("case", CASES)
def test_lower_refuses_with_the_reason(case: str) -> None:
    _, head, cure = CASES[case]
    with pytest.raises(LoweringRefused) as caught:
        lower(function_of(case))
    refusal = caught.value.refusal
    assert str(refusal).startswith(head)
    assert refusal.instead.startswith(cure)
    assert refusal.limit
    if refusal.rule == "cluster-barrier":
        assert refusal.limit == UNIFORM


def test_the_first_thread_alone_may_store() -> None:
    """What the case of two first threads is refused beside."""
    assert "shared" in lower(m.first_threads(1)).image.cuda


@pytest.mark.parametrize("case", CASES)
def test_plain_compilation_fails_with_the_same_text(case: str) -> None:
    with pytest.raises(LoweringRefused) as wanted:
        lower(function_of(case))
    with pytest.raises(RuntimeError) as caught:
        tvm.compile(function_of(case), target=tvm_target("nvidia-h100"))
    assert str(wanted.value) in str(caught.value)


def refusal_of(func: Any, **options: Any) -> str:
    with pytest.raises(LoweringRefused) as caught:
        lower(func, **options)
    return str(caught.value)


def test_symbolic_shape() -> None:
    n = te.var("n")
    a = te.placeholder((n,), "float32", "A")
    func = te.create_prim_func([a, te.compute((n,), lambda i: a[i], name="C")])
    assert refusal_of(func) == (
        "lower: parameter 'A': found shape (n); limit: buffers of constant "
        "shape. Instead: specialise the function to one shape first."
    )


def test_parameter_that_is_no_buffer() -> None:
    @T.prim_func(s_tir=True)
    def func(n: T.int32, B: T.Buffer((4,), "int32")):
        for c in T.parallel(4, annotations=X):
            with T.sblock("fill"):
                vc = T.axis.spatial(4, c)
                B[vc] = n

    assert refusal_of(func).startswith("lower: parameter 'n': found a parameter of type int32; ")


def test_function_without_bindings() -> None:
    a = te.placeholder((4,), "float32", "A")
    func = te.create_prim_func([a, te.compute((4,), lambda i: a[i], name="C")])
    assert refusal_of(func, name="copy") == (
        "lower: function 'copy': found no loop bound to CTAs or threads; limit: a function "
        "scheduled for a GPU. Instead: bind loops with sch.bind and sch.cluster_bind first."
    )


def test_module_of_two_functions() -> None:
    module = ir.IRModule({name: pull.with_attr("global_symbol", name) for name in ("one", "other")})
    assert refusal_of(module) == (
        "lower: module: found 2 functions; limit: one PrimFunc. "
        "Instead: pass the function to lower."
    )


def test_statement_on_the_host_beside_a_kernel() -> None:
    @T.prim_func(s_tir=True)
    def func(
        A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")
    ):
        for c in T.parallel(4, annotations=X):
            with T.sblock("copy"):
                vc = T.axis.spatial(4, c)
                B[vc] = A[vc]
        for i in range(4):
            with T.sblock("host"):
                vi = T.axis.spatial(4, i)
                C[vi] = A[vi]

    assert refusal_of(func) == (
        "lower: host code: found a store outside every kernel: C[i] = A[i]; limit: kernels alone, "
        "each launched once, in program order. Instead: bind the loops of every block to CTAs or "
        "threads."
    )


def test_intermediate_between_kernels() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        G = T.sblock_alloc_buffer((4,), "float32")
        for c in T.parallel(4, annotations=X):
            with T.sblock("fill"):
                vc = T.axis.spatial(4, c)
                G[vc] = A[vc]
        for c in T.parallel(4, annotations=X):
            with T.sblock("read"):
                vc = T.axis.spatial(4, c)
                B[vc] = G[3 - vc]

    assert refusal_of(func) == (
        "lower: kernel 'main_kernel': found argument 'G', which is no parameter of the function; "
        "limit: kernels on the function's own buffers (A, B). Instead: pass an intermediate "
        "between two kernels as a parameter, or keep it inside one kernel."
    )


def test_parameters_of_one_name() -> None:
    a, b = (te.placeholder((4,), "float32", "A") for _ in range(2))
    out = te.compute((4,), lambda i: a[i] + b[i], name="C")
    sch = ir.Schedule(te.create_prim_func([a, b, out]))
    sch.cluster_bind(sch.get_loops(sch.get_sblock("C"))[0])
    names = [str(each.name) for each in sch.mod["main"].params]
    if len(set(names)) < len(names):
        assert refusal_of(sch).startswith("lower: parameter 'A': found two parameters of one name")
    else:
        assert [each.name for each in lower(sch).image.buffers] == names


def test_device_that_allows_less() -> None:
    small = replace(device("nvidia-h100"), name="small", max_cluster=2, max_shared_bytes=1024)
    assert refusal_of(pull, target=small) == (
        "device-limit: kernel 'main_kernel' on small: found 4 CTAs in a cluster; limit: 2 CTAs in "
        "a cluster. Instead: bind smaller loops."
    )
    narrow = replace(small, max_cluster=16, max_threads=16)
    assert "found 32 threads in a CTA; limit: 16 threads in a CTA" in refusal_of(
        pull, target=narrow
    )
    flat = replace(small, max_cluster=16)
    assert refusal_of(split_k(), target=flat).startswith("shared-memory: kernel: found ")


def test_refusal_does_not_spoil_the_next_lowering() -> None:
    refusal_of(r.naive_bind)
    assert lower(two_kernels).image.launches


@pytest.mark.parametrize("name", ["x'", "1x", "\u00e9", "a b"])
def test_names_that_cuda_has_no_place_for(name: str) -> None:
    a = te.placeholder((8,), "float32", name)
    func = te.create_prim_func([a, te.compute((8,), lambda i: a[i], name="C")])
    assert refusal_of(func).startswith(
        f"lower: parameter {name!r}: found a name that CUDA has no place for; limit: letters of "
    )
