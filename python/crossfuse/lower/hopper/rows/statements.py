"""Statements of a chunk by instructions that two warps can do while others multiply.

Two warps have as long for a chunk as the tensor cores for its products. What general lowering
makes of a quotient (a call, for numbers of any size) and of 8-bit floats (one conversion each) is
too much for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import registers
from crossfuse.lower.refusal import refuse

_FLOAT8 = {"float8_e4m3fn": "__nv_fp8x2_e4m3", "float8_e5m2": "__nv_fp8x2_e5m2"}
# Of large divisors __fdividef makes 0 (CUDA C++ programming guide): a sixteenth of none is.
_QUOTIENT = """\
__device__ __forceinline__ float crossfuse_quotient(float a, float b) {
  return __fdividef(a * 0.0625f, b * 0.0625f);
}
"""


def quick(statement: Any) -> Any:
    """Statements with quotients of two units in the last place, and 8-bit floats made in pairs.

    They must be of a function whose arithmetic may be approximate.
    """
    return ir.mutate(statement, (ir.tirx.Div, _quotient), (ir.For, _pairs))


def _quotient(node: Any, mutator: Any) -> Any:
    node = mutator.default_mutate(node)
    if not isinstance(node, ir.tirx.Div) or str(node.ty) != "float32":
        return node
    return ir.cuda_func_call(
        "crossfuse_quotient", node.a, node.b, source_code=_QUOTIENT, return_type="float32"
    )


def _pairs(loop: Any, mutator: Any) -> Any:
    """``for lane: out[lane] = Cast(float8, x)``, two lanes at a time."""
    loop = mutator.default_mutate(loop)
    store, extent = loop.body, ir.constant(loop.extent)
    cast = getattr(store, "value", None)
    if not isinstance(cast, ir.tirx.Cast) or not isinstance(store, ir.BufferStore):
        return loop
    kind = _FLOAT8.get(str(cast.ty))
    plain = len(store.indices) == 1 and store.indices[0].same_as(loop.loop_var)
    if kind is None or not plain or extent is None or extent % 2 or str(cast.value.ty) != "float32":
        return loop
    pair = ir.Var("pair", str(loop.loop_var.ty))

    def value(offset: int) -> Any:
        lane = pair * 2 + offset
        return ir.substitute(cast.value, {loop.loop_var: lane})

    name = f"crossfuse_pair_of_{cast.ty}"
    call = ir.cuda_func_call(
        name, store.buffer.ptr_to([pair * 2]), value(0), value(1), source_code=_pair(name, kind)
    )
    return ir.For(pair, 0, extent // 2, ir.ForKind.UNROLLED, ir.tirx.Evaluate(call))


def _pair(name: str, kind: str) -> str:
    return (
        f"__device__ __forceinline__ void {name}(void* to, float low, float high) {{\n"
        f"  *({kind}*)to = {kind}(make_float2(low, high));\n}}\n"
    )


# Numbers of rows that one thread stores: those of a batch together, a lane each.
#
# A store by one lane is a branch, behind which the warp's next row would wait.


@dataclass(frozen=True, eq=False)
class RowStore:
    """A store of one number of a row, such as its scale."""

    #: As one thread does it.
    store: Any
    #: Registers for the numbers of a batch, the same in all lanes.
    kept: Any


def without_stores(statement: Any, lane: Any, batch: int) -> tuple[Any, list[RowStore]]:
    """Statements that leave in registers what lane 0 would store of a row, and these stores.

    `batch` is the number of rows whose numbers are stored together.
    """
    found: list[RowStore] = []

    def visit(node: Any, mutator: Any) -> Any:
        if not _is_first(node.condition, lane) or node.else_case is not None:
            return mutator.default_mutate(node)
        if not isinstance(node.then_case, ir.BufferStore):
            return mutator.default_mutate(node)
        store = node.then_case
        if not _is_common(store, lane):
            return mutator.default_mutate(node)
        kept = registers(f"{store.buffer.name}_of_batch", batch, str(store.buffer.ty.dtype))
        found.append(RowStore(store, kept))
        return ir.BufferStore(kept, store.value, [0])

    return ir.mutate(statement, (ir.IfThenElse, visit)), found


def _is_first(condition: Any, lane: Any) -> bool:
    if not isinstance(condition, ir.tirx.EQ):
        return False
    return condition.a.same_as(lane) and ir.constant(condition.b) == 0


def _is_common(store: Any, lane: Any) -> bool:
    """Whether all lanes have a number: one that is made of states, and of no thread's elements."""
    parts = (store.value, *store.indices)
    if any(ir.mentions(each, lane) for each in parts):
        return False
    loads = ir.buffer_loads(*parts)
    sources = [each.source for each in loads]
    return all(str(e.scope()) == "local" and ir.element_count(e) == 1 for e in sources)


def number_of(each: RowStore, lane: Any, batch: int) -> Any:
    """The number of a lane's row."""
    value = each.kept[0]
    for row in range(1, batch):
        value = ir.script.Select(lane == row, each.kept[row], value)
    return value


def moved(statement: Any, places: Mapping[Any, Callable[[Any], tuple[Any, Any]]]) -> Any:
    """Statements whose accesses to some buffers go to other ones.

    From the indices of an access, `places` give the other buffer and the indices there.
    """

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if node.source not in places:
            return node
        to, indices = places[node.source](node.indices)
        return to[tuple(indices)]

    def store(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if node.buffer not in places:
            return node
        to, indices = places[node.buffer](node.indices)
        return ir.BufferStore(to, node.value, list(indices))

    return ir.mutate(statement, (ir.TensorLoad, load), (ir.BufferStore, store))


# Copies of statements for one more row: with registers and loop variables of their own.


def fresh(statements: Sequence[Any], shared: Collection[Any] = ()) -> tuple[Any, ...]:
    """Copy statements: the same on other buffers in registers and in other loops.

    They may use registers that an earlier one of them allocates. The copy has the `shared` buffers,
    and what threads share, with the original.
    """
    images: dict[Any, Any] = {}

    for each in statements:
        for node in ir.nodes(each, ir.AllocBuffer):
            old, kind = node.buffer, node.buffer.ty
            if str(old.scope()) == "local" and old not in shared:
                images[old] = ir.tirx.decl_buffer(
                    kind.shape, kind.dtype, old.name, scope=old.scope(), layout=None
                )
        for loop in ir.nodes(each, ir.For):
            images[loop.loop_var] = ir.Var(loop.loop_var.name, str(loop.loop_var.ty))
    return tuple(ir.substitute(each, images) for each in statements)


def independent_of(row: Any, statements: Sequence[Any]) -> dict[Any, Any]:
    """Statements that load the same whatever the row is, by the registers that they fill."""
    stores = [ir.buffer_stores(each) for each in statements]
    filled = [each.buffer for group in stores for each in group]
    found: dict[Any, Any] = {}
    for statement, group in zip(statements, stores, strict=True):
        buffers = {each.buffer for each in group}
        once = len(buffers) == 1 and all(filled.count(each) == len(group) for each in buffers)
        if once and not ir.mentions(statement, row) and _only_loads(statement):
            found[buffers.pop()] = statement
    return found


def _only_loads(statement: Any) -> bool:
    """Whether a statement does nothing but load from global memory to registers."""
    loads, stores = ir.buffer_loads(statement), ir.buffer_stores(statement)
    return (
        bool(loads)
        and all(ir.is_global(each.source) for each in loads)
        and all(str(each.buffer.scope()) == "local" for each in stores)
    )


# Statements of several rows at once: one of each row, then the next one of each.
#
# Row after row, a warp would wait for every one of them: for the elements, a maximum that each of
# its steps waits for, a merge of all lanes, a quotient. Of rows side by side, others have work
# meanwhile.


@dataclass(frozen=True, eq=False)
class RowStatements:
    """Statements of one row, in their order."""

    #: Allocations of registers, and copies of elements to them.
    loads: tuple[Any, ...]
    #: All others: they read no elements but those.
    rest: tuple[Any, ...]

    @staticmethod
    def of(statement: Any, source: Any) -> RowStatements:
        """Sort the statements of a row, whose elements are in `source`.

        What is loaded twice is loaded once. Refuses elements that are loaded where they are used:
        their slot in the ring is free before that.
        """
        held: list[Any] = []
        copies: list[tuple[Any, Any]] = []  # registers, and the loop that fills them
        same: dict[Any, Any] = {}
        rest: list[Any] = []
        for each in ir.sequence(statement):
            into = _copy_of(each, source)
            if isinstance(each, ir.AllocBuffer):
                held.append(each)
            elif into is None:
                rest.append(each)
            else:
                known = [to for to, loop in copies if _alike(loop, to, each, into)]
                if known and _stores(statement, known[0]) == _stores(statement, into) == 1:
                    same[into] = known[0]
                else:
                    copies.append((into, each))
        for each in rest:
            _check_loads(each, source)
        needed = (each for each in held if each.buffer not in same)
        renamed = (ir.substitute(each, same) for each in rest)
        return RowStatements((*needed, *(loop for _, loop in copies)), tuple(renamed))

    def fresh(self) -> RowStatements:
        """The same statements, with registers and loop variables of their own."""
        made = fresh((*self.loads, *self.rest))
        count = len(self.loads)
        return RowStatements(made[:count], made[count:])


def _copy_of(statement: Any, source: Any) -> Any:
    """The registers that a loop copies elements to, if it does nothing else."""
    while isinstance(statement, ir.For):
        statement = statement.body
    if not isinstance(statement, ir.BufferStore) or str(statement.buffer.scope()) != "local":
        return None
    value = statement.value
    if not isinstance(value, ir.TensorLoad) or not value.source.same_as(source):
        return None
    return statement.buffer


def _check_loads(statement: Any, source: Any) -> None:
    for each in ir.buffer_loads(statement):
        if each.source.same_as(source):
            raise refuse(
                "rows",
                f"tensor '{source.name}'",
                found=f"a load of '{source.name}{list(each.indices)}' where it is used",
                limit="loops that copy elements to registers, and do nothing else",
                instead="schedule as schedule_rows_gemm does, or make whole rows: leave the chunk "
                "out",
            )


def _alike(one: Any, into: Any, other: Any, to: Any) -> bool:
    """Whether two loops copy the same elements to the same places of their registers."""
    moved = ir.substitute(other, {to: into})
    first, second = (list(map(int, each.ty.shape)) for each in (into, to))
    return first == second and ir.alike(one, moved)


def _stores(statement: Any, buffer: Any) -> int:
    """Number of statements that store to a buffer."""
    return sum(each.buffer.same_as(buffer) for each in ir.buffer_stores(statement))
