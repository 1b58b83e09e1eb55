"""Answers that are texts, or refusals: both are kept, so that neither is worked out again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from crossfuse import errors
from crossfuse.cache.shelf import Entry, Shelf
from crossfuse.schema import Damaged, read

T = TypeVar("T")


def answered(
    shelf: Shelf, key: str, label: str, make: Callable[[], str], use: Callable[[str], T]
) -> T:
    """What is kept under a key, or what `make` answers.

    Parameters
    ----------
    shelf : Shelf
        Where answers are kept.
    key : str
        See `crossfuse.cache.keys.content_key`.
    label : str
        What was asked, for people.
    make : Callable
        Answers with a text, or raises a refusal.
    use : Callable
        What a text stands for; `Damaged` says that it is no answer.

    Returns
    -------
    T
        What `use` gives.

    Raises
    ------
    RefusedError
        What `make` raised, now or when it was asked first. Refusals of the environment are not
        kept: it may be another one tomorrow.
    """

    def entry() -> Entry:
        try:
            return Entry(make().encode(), {"label": label})
        except errors.EnvironmentRefused:
            raise
        except errors.RefusedError as error:
            text = json.dumps(asdict(error.refusal)).encode()
            return Entry(text, {"label": f"refused: {label}", "refused": type(error).__name__})

    def answer(found: Entry) -> tuple[T] | errors.RefusedError:
        family = found.about.get("refused")
        if family is None:
            return (use(found.data.decode(errors="replace")),)
        kind = getattr(errors, family, None) if isinstance(family, str) else None
        if not isinstance(kind, type) or not issubclass(kind, errors.RefusedError):
            raise Damaged(f"a refusal of family {family!r}", "one of crossfuse.errors")
        return kind(read(errors.Refusal, found.data))

    found = shelf.made(key, entry, answer)
    if isinstance(found, errors.RefusedError):
        raise found
    return found[0]
