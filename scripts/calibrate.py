"""Measures what the planner counts with, on the GPU of this machine, and writes its record.

    python scripts/calibrate.py --device nvidia-h100 --out nvidia-h100.json

Takes about a minute, most of it compiling. Nothing else should run on the GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from crossfuse.bench.calibrate import calibrate
from crossfuse.bench.environment import record
from crossfuse.errors import RefusedError
from crossfuse.files import write_atomically
from crossfuse.hardware import device


def machine() -> dict[str, Any]:
    """What of this machine the numbers depend on; paths stay here."""
    found = record()
    cuda = str(found["versions"].get("nvcc", "unknown")).split()[0]
    kept = {key: found[key] for key in ("crossfuse", "commit", "date")}
    return {"gpu": found["gpu"], "cuda": cuda, **kept}


def main() -> int:
    """Measure, write, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", required=True, help="target name of the record")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    start = time.perf_counter()

    def note(line: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {line}", flush=True)

    try:
        found = calibrate(device(options.device).name, machine, note=note)
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 2
    write_atomically(options.out, found.text().encode())
    note(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
