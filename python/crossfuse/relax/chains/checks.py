"""What a group of operators has to be, apart from a chain, to be replaced by a kernel."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from tvm import relax
from tvm.ir import Var

from crossfuse.relax.chains.groups import Group
from crossfuse.relax.chains.symbols import is_symbolic
from crossfuse.relax.dataflow import Dataflow
from crossfuse.relax.operators import refused

if TYPE_CHECKING:
    from crossfuse.lower.image import BufferSpec


def check_used_inside(dataflow: Dataflow, inner: list[Var], output: Var, group: Group) -> None:
    """Refuse a group of which anything but the result, or a weight's view, is read elsewhere."""
    for value in inner:
        for user in dataflow.users.get(value, []):
            if value.same_as(output) or value in group.views or user in inner:
                continue
            where = f"{dataflow.operator(value)} ({value.name})"
            what = "the model's results"
            if user is not None and not isinstance(dataflow.values[user], relax.Tuple):
                what = dataflow.operator(user) or "a call of another function"
            raise refused(
                where,
                f"an intermediate that {what} reads too",
                "one that nothing else reads",
                "leave the model unfused, or keep that use out of it",
            )


def check_known(values: list[Var], known: Container[Any] | None) -> None:
    """Refuse a group that begins or ends inside of what its caller takes for one operator."""
    for value in values:
        if known is not None and value not in known:
            raise refused(
                str(value.name),
                "a part of an operator",
                "values that operators of the model make",
                "decompose the operator before",
            )


def check_kernel(buffers: Sequence[BufferSpec], values: Sequence[Any]) -> None:
    """Refuse a kernel of fewer rows unless its inputs with rows are those of symbolic extents.

    Parameters
    ----------
    buffers : Sequence[BufferSpec]
        Of the kernel, its inputs first.
    values : Sequence[tvm.ir.Expr]
        The inputs.

    Raises
    ------
    WorkloadRefused
        Naming the operand.
    """
    for buffer, value in zip(buffers, values, strict=False):
        if buffer.rows != is_symbolic(value) and not (buffer.rows and buffer.shape[0] == 1):
            has = "symbolic" if is_symbolic(value) else "static"
            raise refused(
                buffer.name,
                f"{has} extents of an operand {'with' if buffer.rows else 'without'} rows",
                "symbolic extents of the operands with rows, and of no others",
                "export the model with the extents it is to run at",
            )
