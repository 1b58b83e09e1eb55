"""What a group of operators has to be, apart from a chain, to be replaced by a kernel."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from tvm import relax
from tvm.ir import Var

from crossfuse.relax.chains.groups import Group
from crossfuse.relax.dataflow import Dataflow
from crossfuse.relax.operators import refused


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
