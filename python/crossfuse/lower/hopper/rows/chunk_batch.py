"""Statements of several rows at once: one of each row, then the next one of each.

Row after row, a warp would wait for every one of them: for the elements, a maximum that each of its
steps waits for, a merge of all lanes, a quotient. Of rows side by side, others have work meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.rows.statement_copies import flat, fresh
from crossfuse.lower.refusal import refuse


@dataclass(frozen=True, eq=False)
class RowStatements:
    """Statements of one row, in their order.

    Attributes
    ----------
    loads : tuple
        Allocations of registers, and copies of elements to them.
    rest : tuple
        All others: they read no elements but those.
    """

    loads: tuple[Any, ...]
    rest: tuple[Any, ...]

    @staticmethod
    def of(statement: Any, source: Any) -> RowStatements:
        """Sort the statements of a row.

        Parameters
        ----------
        statement : Any
            Of a row, without blocks.
        source : Any
            The buffer that has its elements. What is loaded twice is loaded once.

        Raises
        ------
        LoweringRefused
            If elements are loaded where they are used: their place is free before that.
        """
        held: list[Any] = []
        copies: list[tuple[Any, Any]] = []  # registers, and the loop that fills them
        same: dict[Any, Any] = {}
        rest: list[Any] = []
        for each in flat(statement):
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
        renamed = (ir.substitute(each, lambda var: same.get(var, var)) for each in rest)
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
    loads: list[Any] = []
    ir.walk(statement, (ir.TensorLoad, loads.append))
    for each in loads:
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
    moved = ir.substitute(other, lambda var: into if var.same_as(to) else var)
    first, second = (list(map(int, each.ty.shape)) for each in (into, to))
    return first == second and ir.alike(one, moved)


def _stores(statement: Any, buffer: Any) -> int:
    """Statements that store to a buffer."""
    found: list[Any] = []
    ir.walk(statement, (ir.BufferStore, found.append))
    return sum(each.buffer.same_as(buffer) for each in found)
