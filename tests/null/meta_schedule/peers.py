"""Programs that stand in for the processes that build and measure."""

from __future__ import annotations

import sys

#: Builds at once; a candidate of family ``dsm`` is refused.
BUILDER = """
import json, sys
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    status = "ok"
    if request["do"] == "build" and request["candidate"]["family"] == "dsm":
        status = "refused"
    print(json.dumps({"status": status, "message": "", "seconds": 0.1}), flush=True)
"""
#: Hangs, dies, babbles or is wrong as the family says; times count the measurements of a workload.
MEASURER = """
import json, os, signal, sys, time
print("ready", flush=True)
seen = 0
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "prepare":
        seen = 0
        print(json.dumps({"message": "no such shape" if "M=13," in request["spec"] else ""}),
              flush=True)
        continue
    seen += 1
    family, answer = request["family"], {"status": "ok", "microseconds": 10.0 + seen,
                                         "message": str(os.getpid())}
    if family == "l2":
        time.sleep(60)
    if family == "global":
        os.kill(os.getpid(), signal.SIGSEGV)
    if family == "registers" and seen > 1:
        answer = {"status": "wrong", "message": "off at [0, 3]"}
    if family == "trace":
        print("{nonsense", flush=True)
        continue
    print(json.dumps(answer), flush=True)
"""


def program(text: str) -> tuple[str, ...]:
    """A command that runs `text`."""
    return (sys.executable, "-c", text)
