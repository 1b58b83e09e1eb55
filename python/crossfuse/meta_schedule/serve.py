"""A worker process: ``python -m crossfuse.meta_schedule.serve build|measure|rpc ...``.

Requests come as lines of JSON on standard input, answers go as lines to standard output; the first
line says that everything is imported. Whatever else is printed goes to standard error. The process
ends with its standard input, so that it does not outlive its parent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from crossfuse.measure.peer import Serve, serve_lines


def main() -> None:
    """Serve until standard input ends."""
    serve_lines(lambda: KINDS[sys.argv[1]](*sys.argv[2:]))


def builder() -> Serve:
    """Compile candidates and compute references; neither needs a GPU.

    Requests are ``{"do": "build", "candidate", "folder", "target", "timeout"}`` or ``{"do":
    "reference", "spec", "folder"}``, see `crossfuse.meta_schedule.functions.problem_of`.
    """
    # Beside the process that measures, which is not to wait for a core.
    os.nice(15)
    import crossfuse._tvm  # noqa: F401
    from crossfuse.errors import RefusedError
    from crossfuse.meta_schedule.build import Build, build_candidate
    from crossfuse.meta_schedule.candidate import Candidate
    from crossfuse.meta_schedule.functions import problem_of

    def reference(spec: str, folder: Path) -> Build:
        try:
            problem_of(spec, folder)
        except RefusedError as error:
            return Build("refused", str(error))
        return Build("ok")

    def serve(request: Mapping[str, Any]) -> Any:
        folder = Path(request["folder"])
        if request["do"] == "reference":
            return asdict(reference(request["spec"], folder))
        candidate = Candidate.from_json(request["candidate"], "request")
        return asdict(build_candidate(candidate, folder, request["target"], request["timeout"]))

    return serve


def measurer() -> Serve:
    """Measure candidates on the GPU, see `crossfuse.meta_schedule.session.Session`."""
    from crossfuse.meta_schedule.session import Session

    session = Session()
    session.load()
    return session.serve


def over_rpc(tracker: str, timeout: str) -> Serve:
    """Measure candidates on a server, see `crossfuse.meta_schedule.rpc.RpcSession`.

    The tracker is ``host:port:key``; the server ends a session after `timeout` seconds.
    """
    from crossfuse.meta_schedule.rpc import RpcSession, read_tracker

    session = RpcSession(read_tracker(tracker), int(timeout))
    session.load()
    return session.serve


#: What a process can be asked to serve.
KINDS: dict[str, Callable[..., Serve]] = {"build": builder, "measure": measurer, "rpc": over_rpc}


if __name__ == "__main__":
    main()
