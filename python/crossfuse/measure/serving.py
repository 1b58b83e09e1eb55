"""The serving end of a `crossfuse.measure.peer.Peer`: requests in, answers out, a line each."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from crossfuse.schema import parse

#: Answers a request.
Serve = Callable[[Mapping[str, Any]], Any]


def serve_lines(make: Callable[[], Serve]) -> None:
    """Serve until standard input ends; the first line written says that the process is ready.

    `make` imports what takes long, then gives the function that answers requests. Whatever else is
    printed goes to standard error.
    """
    answers = own_stdout()
    requests = _requests()
    serve = make()
    answers.write("ready\n")
    while True:
        answers.flush()
        answers.write(json.dumps(serve(requests.get())) + "\n")


def own_stdout() -> TextIO:
    """Reserve standard output for answers; what libraries print goes to standard error."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)
    return answer


def _requests() -> queue.SimpleQueue[Any]:
    """Requests, read by a thread of its own, so that their end can end the process at any time."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            found.put(parse(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return found
