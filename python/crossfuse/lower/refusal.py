"""Refusals of the lowering, and how they get out of TVM.

TVM's FFI rebuilds an exception that passes through it as a RuntimeError of the same text, and a
pass runs inside it, as do the callbacks of a walk. So the last refusal is remembered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from crossfuse import errors
from crossfuse.errors import LAST, LoweringRefused, RefusedError

#: A rule of the lowering that is broken at several places, see `crossfuse.errors.Rule`.
Rule = partial(errors.Rule, LoweringRefused)


def refuse(rule: str, where: str, *, found: object, limit: str, instead: str) -> RefusedError:
    """Build a `LoweringRefused` to raise, see `crossfuse.errors.refuse`."""
    return errors.refuse(LoweringRefused, rule, where, found=found, limit=limit, instead=instead)


@contextmanager
def refusals(where: str) -> Iterator[None]:
    """Raise a refusal inside of TVM as itself, and any other failure as a refusal.

    `where` is what is lowered, for the refusal of a function that TVM's own passes fail on, which
    has TVM's message.
    """
    LAST.made = None
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        if LAST.made is not None:
            family, facts = LAST.made
            if str(facts) in str(error):
                raise family(facts) from None
        raise refuse(
            "lower",
            where,
            found=f"a failure of TVM: {_sentence(error)}",
            limit="a function that TVM's passes and code generator take",
            instead="change the schedule as the message says",
        ) from error


def _sentence(error: Exception) -> str:
    """The telling line of a TVM error, without the rendered program and the stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = (line for line in lines if "Check failed" in line or "rror" in line)
    return next(telling, lines[0] if lines else type(error).__name__).rstrip(".")
