"""How kernels of several GPUs wait for each other: between two, or CTA by CTA inside of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.files import packaged_text
from crossfuse.lower.image import (
    ARRIVALS,
    COUNTS,
    RANK,
    WINDOW_UNIT,
    BufferSpec,
    KernelImage,
    Launch,
)

#: Attributes of a function of one rank: its kernels wait for other ranks, or its CTAs exchange what
#: is in slabs; the value is the number of ranks.
MEETS, EXCHANGES = "crossfuse.meets_ranks", "crossfuse.exchanges_ranks"

_GRID = "thread_extent"
#: Nests that become one kernel: that which fills slabs, and that which reads them.
FILL_AND_READ = 2


def counts_of(names: Sequence[str]) -> int:
    """Position of the counts of ranks among arguments: the rank is before, windows are behind."""
    return next(place for place, name in enumerate(names) if name in COUNTS)


def meet_ranks() -> Any:
    """Pass: kernels that touch peers' memory wait for all ranks.

    They do so first, and arrive in the end: between any two such kernels, of one call or of two,
    stands a barrier of all ranks. What one rank writes others read afterwards, and it is not
    written again before they have.

    Where CTAs exchange what is in slabs, the kernel that fills these and that which reads them are
    one, in whose middle each CTA waits for those of its number. It runs where kernels have their
    threads and buffers their shapes.
    """

    def transform(func: Any) -> Any:
        attributes = func.attrs or {}
        if MEETS in attributes:
            meeting = _Meeting(func, int(attributes[MEETS]))
            return ir.with_body(func, ir.mutate(func.body, (ir.AttrStmt, meeting)))
        if EXCHANGES in attributes:
            exchange = _Exchange(func, int(attributes[EXCHANGES]))
            return ir.with_body(func, ir.mutate(func.body, (ir.SeqStmt, exchange)))
        return func

    return ir.prim_func_pass("MeetRanks", transform)


class _Barriers:
    """Calls of ``device/ranks.cuh`` in a function of one rank."""

    def __init__(self, func: Any, count: int) -> None:
        place = counts_of([str(each.name) for each in func.params])
        self.rank, self.counts = func.params[place - 1 : place + 1]
        self.windows = func.params[place + 1 :]
        self.count = count

    def call(self, name: str, *more: Any, returned: str = "void") -> Any:
        """A call of a device function about the counts of all ranks."""
        zero = ir.tirx.IntImm("int32", 0)
        return ir.cuda_func_call(
            name,
            ir.tirx.address_of(ir.tirx.BufferLoad(self.counts, [zero, zero])),
            ir.tirx.BufferLoad(self.rank, [zero]),
            ir.tirx.IntImm("int32", self.count),
            ir.tirx.IntImm("int64", int(self.counts.ty.shape[1])),
            *more,
            source_code=packaged_text("crossfuse.lower", "device/ranks.cuh"),
            return_type=returned,
        )


class _Meeting(_Barriers):
    """Adds the barriers to the kernels of a function."""

    def __call__(self, node: Any, mutator: Any) -> Any:
        if node.attr_key != _GRID:
            return mutator.default_mutate(node)
        touches = any(ir.mentions(node, each) for each in self.windows)
        return self._met(node) if touches else node

    def _met(self, node: Any) -> Any:
        """The kernel with its barriers, inside of all that says how it is launched."""
        if _is_launch(node):
            return ir.AttrStmt(node.node, node.attr_key, node.value, self._met(node.body))
        await_ = ir.Evaluate(self.call("crossfuse_await_ranks"))
        arrive = ir.Evaluate(self.call("crossfuse_arrive_at_ranks"))
        return ir.SeqStmt([await_, *ir.sequence(node), arrive])


class _Exchange(_Barriers):
    """Makes one kernel of that which fills slabs and that which reads them.

    A CTA has two places in its slab, which it fills in turns: it may fill one of them again when
    all ranks have filled the other one, since by then they have read this one.
    """

    def __call__(self, sequence: Any, mutator: Any) -> Any:
        launches = [each for each in sequence.seq if _is_launch(each)]
        if len(launches) != FILL_AND_READ:
            return mutator.default_mutate(sequence)
        joined = self._joined(*launches)
        others = [each for each in sequence.seq if not _is_launch(each)]
        return ir.SeqStmt([*others, joined]) if others else joined

    def _joined(self, fill: Any, read: Any) -> Any:
        turn = ir.tirx.Var("turn", "int32")
        behind = ir.substitute(_inside(read), _renamed(read, fill))
        told = self.call("crossfuse_exchange_with_ranks", turn)
        body = [
            ir.Bind(turn, self.call("crossfuse_turn_of_ranks", returned="int32")),
            *(self._in_turns(each, turn & 1) for each in ir.sequence(_inside(fill))),
            ir.Evaluate(told),
            *(self._in_turns(each, turn & 1) for each in ir.sequence(behind)),
        ]
        return _launched(fill, ir.SeqStmt(body))

    def _in_turns(self, body: Any, half: Any) -> Any:
        """What a kernel does, with slabs of that turn."""

        def place(buffer: Any, indices: Any, mutator: Any) -> list[Any]:
            *others, last = (mutator.mutate(each) for each in indices)
            return [*others, half * half_of(buffer) + last]

        def load(node: Any, mutator: Any) -> Any:
            if node.source not in self.windows:
                return mutator.default_mutate(node)
            return ir.tirx.BufferLoad(node.source, place(node.source, node.indices, mutator))

        def store(node: Any, mutator: Any) -> Any:
            if node.buffer not in self.windows:
                return mutator.default_mutate(node)
            value = mutator.mutate(node.value)
            return ir.BufferStore(node.buffer, value, place(node.buffer, node.indices, mutator))

        return ir.mutate(body, (ir.TensorLoad, load), (ir.BufferStore, store))


def half_of(window: Any) -> int:
    """Elements between the two places of a CTA in a window of exchanged slabs."""
    return int(window.ty.strides[1]) // 2


def _is_launch(node: Any) -> bool:
    return isinstance(node, ir.AttrStmt) and node.attr_key == _GRID


def _inside(node: Any) -> Any:
    """What is inside of all that says how a kernel is launched."""
    return _inside(node.body) if _is_launch(node) else node


def _launched(like: Any, body: Any) -> Any:
    """A kernel that is launched as another one."""
    if not _is_launch(like):
        return body
    return ir.AttrStmt(like.node, like.attr_key, like.value, _launched(like.body, body))


def _renamed(kernel: Any, other: Any) -> dict[Any, Any]:
    """For variables of a kernel's launch those of another one, of as many threads and CTAs."""
    theirs = _launch_variables(other)
    return {each: theirs[tag] for tag, each in _launch_variables(kernel).items()}


def _launch_variables(node: Any) -> dict[str, Any]:
    if not _is_launch(node):
        return {}
    return {str(node.node.thread_tag): node.node.var, **_launch_variables(node.body)}


# A kernel for nothing else.

#: Threads of a kernel that does nothing but meet the other ranks: one for each of them.
_MEETING = 32


def meeting(ranks: int, slab: int) -> KernelImage:
    """A kernel of one CTA that ends when all ranks have done what comes before theirs.

    `slab` is the size in bytes of the buffer in peers' memory that copies between two of its calls
    are to; the kernel does not touch it.
    """
    row, name = WINDOW_UNIT // 4, "meet_ranks"
    windows = tuple(
        BufferSpec(each, (ranks, size // 4), dtype, output=True, ranks=ranks)
        for each, dtype, size in ((ARRIVALS, "int32", WINDOW_UNIT), ("slabs", "float32", slab))
    )
    text = (
        f"{packaged_text('crossfuse.lower', 'device/ranks.cuh')}\n"
        f'extern "C" __global__ void __launch_bounds__({_MEETING}) {name}_kernel('
        "int* arrivals, const int* rank) {\n"
        f"  crossfuse_arrive_at_ranks(arrivals, rank[0], {ranks}, {row});\n"
        "  __syncthreads();  // the own arrival is counted, which says for how many to wait\n"
        f"  crossfuse_await_ranks(arrivals, rank[0], {ranks}, {row});\n"
        "}\n"
    )
    one = (1, 1, 1)
    launch = Launch(f"{name}_kernel", one, (_MEETING, 1, 1), one, 0, (ARRIVALS, RANK))
    own = BufferSpec(RANK, (1,), "int32", output=False)
    return KernelImage(name, text, (own, *windows), (launch,))
