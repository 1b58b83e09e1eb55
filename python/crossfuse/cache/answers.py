"""Cached answers that are texts or refusals, so that neither is computed twice."""

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
    """The cached answer under a key, else what `make` answers; `use` reads a value from its text.

    `use` raises `Damaged` for text that is no answer, and it is computed again. A refusal that
    `make` raises is cached and raised again, but for those of the environment, which may differ
    tomorrow. `label` describes the question to people who list the cache.
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
