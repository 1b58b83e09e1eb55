"""Answers that are texts, or refusals: both are kept, so that neither is worked out again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from crossfuse import errors
from crossfuse.cache.shelf import Entry, Shelf


def answered(shelf: Shelf, key: str, label: str, make: Callable[[], str]) -> str:
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

    Returns
    -------
    str
        The text.

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

    found = shelf.made(key, entry)
    family = found.about.get("refused")
    if family is not None:
        raise getattr(errors, family)(errors.Refusal(**json.loads(found.data)))
    return found.data.decode()
