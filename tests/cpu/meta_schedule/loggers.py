"""TVM's logger under pytest."""

from __future__ import annotations

import logging


def drop_nameless_handlers() -> None:
    """Before each tuning: TVM asks handlers of its logger for names, and those of pytest have none.

    pytest adds them from the second tuning of a process on, when TVM has cut the logger off from
    the root's.
    """
    logger = logging.getLogger("tvm.s_tir.meta_schedule")
    for handler in [each for each in logger.handlers if each.get_name() is None]:
        logger.removeHandler(handler)
