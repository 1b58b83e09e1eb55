"""Folders for one process: gone when it ends, whatever becomes of the processes that it forks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from crossfuse.files import scratch_folder
folder = scratch_folder()
(folder / "kernel.so").write_bytes(b"")
if os.fork() == 0:
    sys.exit()
os.wait()
print(folder, (folder / "kernel.so").exists())
"""


def test_a_folder_goes_with_the_process_that_made_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    folder, was_there = done.stdout.split()
    assert was_there == "True" and not Path(folder).exists()
