"""Programs that stand in for the processes that build and measure."""

from __future__ import annotations

import sys

#: Builds at once, a file with the family; a candidate of family ``dsm`` is refused.
BUILDER = """
import hashlib, json, pathlib, sys
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    status, candidate = "ok", request.get("candidate")
    if candidate is not None:
        status = "refused" if candidate["family"] == "dsm" else "ok"
        name = hashlib.sha256(json.dumps(candidate, sort_keys=True).encode()).hexdigest()[:16]
        library = pathlib.Path(request["folder"], "libraries", f"{name}.so")
        library.parent.mkdir(exist_ok=True)
        library.write_text(candidate["family"])
    print(json.dumps({"status": status, "message": "", "seconds": 0.1}), flush=True)
"""
#: Hangs, dies, babbles or is wrong as the family says; times count the measurements of a workload.
MEASURER = """
import json, os, pathlib, signal, sys, time
print("ready", flush=True)
seen = 0
for line in sys.stdin:
    request = json.loads(line)
    if not request["measure"]:
        seen = 0
        print("null", flush=True)
        continue
    seen += 1
    family = pathlib.Path(request["way"]["source"]).read_text()
    answer = {"status": "ok", "microseconds": 10.0 + seen, "message": str(os.getpid())}
    if "M=13," in request["job"]["spec"]:
        answer = {"status": "failed", "message": "while it was prepared: no such shape"}
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
