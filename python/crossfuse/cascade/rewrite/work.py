"""Counts the bytes, registers and operations of a stream, for the planner's estimates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.cascade.rewrite.passes import item_bytes

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.site import Site

#: Bytes of a register.
_REGISTER = 4
#: The type of which `crossfuse.lower.pack_registers` packs two into a register.
_PACKED = "bfloat16"


@dataclass(frozen=True)
class Work:
    """A cascade in numbers; bytes and registers are those of its streams along the axis."""

    #: Rows of the cascade.
    rows: int
    #: Elements of a row.
    length: int
    #: Elements that a thread takes in side by side.
    vector: int
    #: Bytes of an element that no other row reads, of all that the state takes in.
    read: int
    #: Bytes of an element that outputs over the axis need again.
    kept: int = 0
    #: Bytes of an element that only outputs need, and no other row reads.
    late: int = 0
    #: Bytes of an element that outputs over the axis write.
    written: int = 0
    #: Bytes of a vector that the state takes in.
    fetched: int = 16
    #: Registers that a vector takes while the state takes it in.
    swept: int = 4
    #: Registers of a vector that outputs need again.
    held: int = 0
    #: Registers of a vector of everything that outputs need.
    emitted: int = 0
    #: Whether registers hold two elements each, which takes as many again to compute with.
    unpacked: bool = False
    #: Registers of a vector of contributions that outputs use again; see
    #: `crossfuse.cascade.rewrite.reuse`.
    reused: int = 0
    #: Operations of an element that these spare.
    spared: int = 0
    #: Numbers of the state.
    slots: int = 2
    #: Instructions of an element on the special-function units.
    exponentials: int = 0
    #: Other instructions of an element.
    operations: int = 0

    @property
    def outputs(self) -> bool:
        """Whether there are outputs over the axis."""
        return self.written > 0


def work_of(site: Site, derivation: Derivation) -> Work:
    """Count the bytes, registers and operations of a cascade as a stream."""
    from crossfuse.cascade.rewrite.counting import exponentials, operations
    from crossfuse.cascade.rewrite.frame import frame_of
    from crossfuse.cascade.rewrite.reuse import reusing
    from crossfuse.cascade.rewrite.scripting import numbers
    from crossfuse.cascade.rewrite.tiles import StreamTiles

    frame = frame_of(site, derivation, StreamTiles())
    swept, emitted = frame.streams(frame.swept), frame.streams(frame.emitted)
    again = [each for each in emitted if any(each.same(other) for other in swept)]
    late = [each for each in emitted if each not in again]
    vector = frame.cover.vector
    elements = site.cascade.elements
    taken = [each.contribution for each in derivation.slots]
    given = list(derivation.rows.values())
    shorter, reused = reusing(derivation)
    left = operations(list(shorter.rows.values()), (*elements, *(each.kept for each in reused)))
    along = [each for each in site.outputs if each.name in derivation.rows]
    return Work(
        frame.rows,
        frame.cover.length,
        vector,
        read=_bytes(each for each in swept if _of_row(each, site)),
        kept=_bytes(again),
        late=_bytes(each for each in late if _of_row(each, site)),
        written=sum(item_bytes(str(each.buffer.ty.dtype)) for each in along),
        fetched=_bytes(swept) * vector,
        swept=_registers(swept, vector),
        held=_registers(again, vector),
        emitted=_registers(emitted, vector),
        unpacked=any(_is_packed(each) for each in swept),
        reused=vector * len(reused),
        spared=max(0, operations(given, elements) - left),
        slots=sum(len(numbers(each, frame.dtype)) for each in derivation.slots),
        # What outputs compute again is computed in a second sweep.
        exponentials=exponentials(taken, elements) + exponentials(given, elements),
        operations=len(taken) + operations(taken, elements) + operations(given, elements),
    )


def _bytes(streams: Iterable[Any]) -> int:
    return sum(item_bytes(str(each.buffer.ty.dtype)) * each.width for each in streams)


def _is_packed(stream: Any) -> bool:
    return str(stream.buffer.ty.dtype) == _PACKED and stream.lanes > 1


def _registers(streams: Iterable[Any], vector: int) -> int:
    """Registers of a vector; an element takes one at least, unless two are packed."""
    count = 0
    for each in streams:
        elements = vector * each.width
        size = item_bytes(str(each.buffer.ty.dtype))
        count += elements // 2 if _is_packed(each) else elements * max(1, size // _REGISTER)
    return count


def _of_row(stream: Any, site: Any) -> bool:
    """Whether a stream depends on the row; scales of a norm do not, and stay in L2."""
    from crossfuse import _tvm as ir

    used = [each for load in stream.loads for i in load.indices for each in ir.variables(i)]
    return any(each.same_as(row) for each in used for row in site.rows)
