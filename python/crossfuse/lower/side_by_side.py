"""Independent nests of one function as one launch, in which each has CTAs of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.refusal import refuse
from crossfuse.markers import SIDE_BY_SIDE

_CTAS = "blockIdx.x"


@dataclass(frozen=True)
class _Launch:
    """A nest that would be a kernel by itself."""

    #: Its extents of CTAs and threads, outermost first, each an attribute of a statement.
    extents: tuple[Any, ...]
    body: Any

    @property
    def indices(self) -> dict[str, Any]:
        """Variables of CTAs and threads by their tags."""
        return {str(each.node.thread_tag): each.node.var for each in self.extents}

    @property
    def sizes(self) -> dict[str, int]:
        """Extents by the same tags."""
        return {str(each.node.thread_tag): int(each.value) for each in self.extents}


def side_by_side() -> Any:
    """Pass: launches of a function with `SIDE_BY_SIDE` become branches of one.

    The kernel has the CTAs of all of them, one after another::

        for blockIdx.x in 8: first(blockIdx.x)      for blockIdx.x in 8 + 4:
        for blockIdx.x in 4: second(blockIdx.x)         if blockIdx.x < 8: first(blockIdx.x)
                                                        else: second(blockIdx.x - 8)

    It runs after barriers of threads are placed, which TVM refuses to do in a branch; all threads
    of a CTA take the same one. Refused are launches of different threads, and those that share
    what one of them stores.
    """
    return ir.body_pass("SideBySide", SIDE_BY_SIDE, _joined)


def _joined(body: Any) -> Any:
    statements = list(body.seq) if isinstance(body, ir.SeqStmt) else [body]
    at = [place for place, each in enumerate(statements) if _is_launch(each)]
    launches = [_launch(statements[each]) for each in at]
    _check_alike(launches)
    _check_apart(launches)
    kept = [each for place, each in enumerate(statements) if place not in at[1:]]
    kept[at[0]] = _one_launch(launches)
    return ir.SeqStmt(kept) if len(kept) > 1 else kept[0]


def _is_launch(statement: Any) -> bool:
    return isinstance(statement, ir.AttrStmt) and str(statement.attr_key) == "thread_extent"


def _launch(nest: Any) -> _Launch:
    """Take the extents out of a nest; what is allocated between them moves inside."""
    extents: list[Any] = []

    def inside(node: Any, mutator: Any) -> Any:
        if not _is_launch(node):
            return mutator.default_mutate(node)
        extents.append(node)
        return mutator.mutate(node.body)

    body = ir.mutate(nest, (ir.AttrStmt, inside))
    return _Launch(tuple(extents), body)


def _check_alike(launches: Sequence[_Launch]) -> None:
    first, *_ = (_threads(each) for each in launches)
    for each in launches:
        if _threads(each) != first or _CTAS not in each.sizes:
            raise refuse(
                "side-by-side",
                "function",
                found=f"nests of {_text(launches[0])} and of {_text(each)}",
                limit="CTAs along x, and threads alike in all nests",
                instead="schedule all nests with the same tiles, or leave the annotation out",
            )


def _threads(launch: _Launch) -> dict[str, int]:
    return {tag: size for tag, size in launch.sizes.items() if tag != _CTAS}


def _text(launch: _Launch) -> str:
    return ", ".join(f"{size} {tag}" for tag, size in launch.sizes.items())


def _check_apart(launches: Sequence[_Launch]) -> None:
    """Refuse nests of which one stores what another one uses: none waits for another."""
    for one in launches:
        stored = {each.buffer for each in ir.nodes(one.body, ir.BufferStore)}
        for other in (each for each in launches if each is not one):
            used = set(ir.variables(other.body))
            shared = next((each for each in stored if each in used), None)
            if shared is not None:
                raise refuse(
                    "side-by-side",
                    f"buffer '{shared.name}'",
                    found="a nest that stores what another one uses",
                    limit="nests that run at the same time, in any order",
                    instead="leave the annotation out: then they are kernels one after another",
                )


def _one_launch(launches: Sequence[_Launch]) -> Any:
    first = launches[0]
    body = _branches(launches, 0, first.indices)
    total = sum(each.sizes[_CTAS] for each in launches)
    for each in reversed(first.extents):
        is_ctas = str(each.node.thread_tag) == _CTAS
        size = ir.tirx.IntImm("int32", total) if is_ctas else each.value
        body = ir.AttrStmt(each.node, each.attr_key, size, body)
    return body


def _branches(launches: Sequence[_Launch], start: int, indices: Mapping[str, Any]) -> Any:
    """What CTAs from `start` on do: those of the first launch, then those of the others."""
    first, *others = launches
    place = indices[_CTAS]
    own = {first.indices[tag]: var for tag, var in indices.items()}
    own[first.indices[_CTAS]] = place - start if start else place
    body = ir.substitute(first.body, own)
    if not others:
        return body
    end = start + first.sizes[_CTAS]
    return ir.IfThenElse(place < end, body, _branches(others, end, indices))
