"""Builders of Relax functions that an exception left half done."""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import Any

from tvm import relax


def end_blocks(error: BaseException) -> None:
    """End the blocks that were begun where an exception came from.

    A builder that is destroyed with open blocks says so on standard error. Those of TVM's importers
    can be reached only through the frames that the exception left. Call it outside of the builder's
    own scopes.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        held = [getattr(owner, name, None) for name in ("block_builder", "bb")]
        for each in (*frame.f_locals.values(), *held):
            if isinstance(each, relax.BlockBuilder):
                _end(each)


def _end(builder: Any) -> None:
    with suppress(Exception):  # TVM's, that there is no block any more
        while True:
            builder._end_block()
