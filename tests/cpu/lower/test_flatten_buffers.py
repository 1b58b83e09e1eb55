"""Indices of flat buffers, by brute force; and that TVM's own are wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tvm.script import tirx as T

from cpu.lower.flat_indices import wrong_indices
from crossfuse import _tvm as ir
from crossfuse.lower.hidden import flatten_buffers

_FACTORS = (1, 1, 2, 4, 8, 3, 24, 25, 7, 100, 127, 1016, 4064, 2032)
_POWERS = (2, 4, 8, 16, 32, 64, 128)
_OTHERS = (3, 6, 12, 24, 40, 100, 5, 7, 96)


@T.prim_func
def remainder_beside_a_parameter(A: T.Buffer((4096,), "float32"), id: T.int32):
    x = T.launch_thread("threadIdx.x", 384)
    A[(id * 24 + x % 128) // 32] = T.float32(0)


@T.prim_func
def remainder_beside_a_call(A: T.Buffer((64, 512), "float32")):
    x = T.launch_thread("threadIdx.x", 384)
    id = T.cuda.func_call("which", source_code="", return_type="int32")
    A[(id * 4064 + x % 128 * 4) // 128 % 64, (id * 4064 + x % 128 * 4) % 128] = T.float32(0)


@T.prim_func
def odd_remainder_beside_a_load(A: T.Buffer((4096,), "float32"), B: T.Buffer((1,), "int32")):
    x = T.launch_thread("threadIdx.x", 128)
    A[(B[0] * 24 + x % 24 * 4 - 4) // 8] = A[(B[0] * 24 + x % 24 * 4) // 8]


@T.prim_func
def remainder_beside_a_constant(A: T.Buffer((4096,), "float32")):
    x = T.launch_thread("threadIdx.x", 128)
    A[(119 + x % 4) // 4] = T.float32(0)


@T.prim_func
def constant_beside_overlapping_loops(A: T.Buffer((4096,), "float32")):
    x = T.launch_thread("threadIdx.x", 100)
    for i in range(16):
        A[(x // 8 * 4 + i + 17) // 32] = T.float32(0)


WRONG = {
    "parameter": remainder_beside_a_parameter,
    "load": odd_remainder_beside_a_load,
    "constant": remainder_beside_a_constant,
    "overlapping": constant_beside_overlapping_loops,
}


@pytest.mark.parametrize("name", WRONG)
def test_tvm_alone_is_wrong(name: str) -> None:
    """If this fails, TVM may have been mended, and `flatten_buffers` be superfluous."""
    assert list(wrong_indices(WRONG[name], ours=False, all_values=True))


@pytest.mark.parametrize("name", WRONG)
def test_indices_are_right(name: str) -> None:
    assert not list(wrong_indices(WRONG[name], all_values=True))


def test_indices_of_rows_are_right() -> None:
    assert not list(wrong_indices(remainder_beside_a_call, all_values=True))


def test_what_iterator_maps_make_of_it() -> None:
    """The reason: a remainder of the sum is taken for the sum of a remainder."""
    x, other = ir.Var("x", "int32"), ir.Var("id", "int32")
    index = ir.tirx.floordiv(other * 24 + ir.tirx.floormod(x, 128), 32)
    (found,) = ir.sym.iter_map_simplify([index], {x: ir.tvm.ir.Range(0, 384)})
    assert str(found) == "(x + T.max(0, id * 24 % 32)) % 128 // 32 + id * 24 // 32"


class _Function:
    """A random function: one store, at an index as the lowering makes them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.threads = ir.Var("x", "int32"), self.random.choice([128, 256, 384, 96, 100])
        sizes = [self.random.choice([2, 3, 4, 8, 16, 7])] * self.random.choice([0, 1, 1])
        self.loops = [(ir.Var("i", "int32"), size) for size in sizes]
        self.warp = ir.Var("warp", "int32")
        self.id = ir.cuda_func_call("which", source_code="", return_type="int32")

    def often(self, share: float) -> bool:
        return self.random.random() < share

    def divisor(self) -> int:
        return self.random.choice(_POWERS if self.often(0.7) else _OTHERS)

    def split(self) -> Any:
        """A part of an iterator."""
        found = self.random.choice([self.threads] * 4 + self.loops)[0]
        for _ in range(self.random.choice([0, 1, 1, 1, 2])):
            take = ir.tirx.floormod if self.often(0.6) else ir.tirx.floordiv
            found = take(found, self.divisor())
        return found

    def base(self) -> Any:
        """What is no iterator."""
        four = ir.tirx.floordiv(self.warp, 4)
        constant = ir.tirx.IntImm("int32", self.random.choice([1, 3, 24, 17, -1]))
        return self.random.choice([self.id, self.id, self.warp, four - 1, constant])

    def sum(self) -> Any:
        total = self.base() * self.random.choice(_FACTORS)
        total = total + self.split() * self.random.choice([1, 1, 2, 4, 8, 3])
        for variable, _ in self.loops:
            total = total + variable * self.random.choice([0, 1, 16, 32, 64, 128, 96])
        return total + (self.split() * self.random.choice([1, 4, 16]) if self.often(0.2) else 0)

    def index(self) -> list[Any]:
        total, divisor = self.sum(), self.divisor()
        row, column = ir.tirx.floordiv(total, divisor), ir.tirx.floormod(total, divisor)
        found = self.random.choice([[row], [column], [row * 512 + column], [row, column]])
        if self.often(0.3):
            found[0] = found[0] + self.split() * self.random.choice([1, 4, 32, 2048])
        if self.often(0.15):
            found[-1] = ir.tirx.floormod(found[-1] + self.split() * 2, self.divisor())
        return found

    def make(self) -> Any:
        indices = self.index()
        shape = [4096, 256][: len(indices)]
        buffer = ir.tirx.decl_buffer(shape, "float32", name="A")
        body = ir.BufferStore(buffer, ir.tirx.FloatImm("float32", 0.0), indices)
        if self.often(0.4):
            limit = self.random.choice([1, 3, 10, 33, 100, 500])
            condition = self.random.choice([self.sum(), self.split()]) < limit
            body = ir.IfThenElse(condition, body, None)
        for variable, extent in self.loops:
            body = ir.For(variable, 0, extent, ir.ForKind.SERIAL, body)
        variable, extent = self.threads
        threads = ir.tirx.IterVar(None, variable, ir.tirx.IterVar.ThreadIndex, "threadIdx.x")
        extent = ir.tirx.IntImm("int32", extent)
        return ir.PrimFunc([self.warp, buffer], ir.AttrStmt(threads, "thread_extent", extent, body))


#: Seeds of functions that TVM alone gives wrong indices.
_KNOWN = (443, 843, 962, 2244, 2771, 2885, 2907, 2972)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(each, marks=pytest.mark.nightly) for each in range(100, 400, 100))]
)
def test_random_indices_are_right(first: int) -> None:
    for seed in (*range(first, first + 100), *_KNOWN):
        found = list(wrong_indices(_Function(seed).make(), all_values=True))
        assert not found, (seed, found)


def test_known_seeds_are_wrong_without_it() -> None:
    for seed in _KNOWN:
        assert list(wrong_indices(_Function(seed).make(), ours=False, all_values=True)), seed


@T.prim_func
def iterators_alone(A: T.Buffer((64, 64), "float32"), B: T.Buffer((3, 64, 64), "float32")):
    x = T.launch_thread("threadIdx.x", 128)
    for i in range(32):
        A[i * 2 + x // 64, x % 64] = B[i % 3, (i * 128 + x) // 64, (i * 128 + x) % 64]


@T.prim_func
def others_alone(A: T.Buffer((4096,), "float32"), id: T.int32):
    x = T.launch_thread("threadIdx.x", 128)
    A[(id * 24 + 5) // 32 + x % 128 + id % 7 * 8] = T.float32(0)


@pytest.mark.parametrize("func", [iterators_alone, others_alone])
def test_a_function_without_such_indices_is_the_same_object(func: Any) -> None:
    hide, flatten, show = flatten_buffers()
    module = ir.IRModule({"main": func})
    assert hide(module)["main"].same_as(func)
    flat = flatten(module)
    assert show(flat)["main"].same_as(flat["main"])
    assert not list(wrong_indices(func, all_values=True))


@pytest.mark.parametrize("func", [*WRONG.values(), remainder_beside_a_call])
def test_nothing_stays_hidden(func: Any) -> None:
    module = ir.IRModule({"main": func})
    hide, flatten, show = flatten_buffers()
    hidden = hide(module)
    assert "reinterpret" in str(hidden)
    assert "reinterpret" not in str(show(flatten(hidden)))
