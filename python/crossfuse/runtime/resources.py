"""Resources of a kernel as ptxas reports them: registers, spills, shared memory, advisories."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ResourceUsage:
    """What ptxas reports for one kernel.

    Attributes
    ----------
    kernel : str
        Name of the ``__global__`` function.
    registers : int
        Registers of one thread.
    spill_store_bytes, spill_load_bytes : int
        Register spills of one thread, in bytes.
    static_shared_bytes : int
        Static shared memory of one CTA, in bytes.
    stack_bytes : int
        Stack frame of one thread, in bytes.
    barriers : int
        Named barriers in use.
    advisories : tuple[str, ...]
        Numbers of ptxas' remarks on how it compiled wgmma, such as ``"C7510"``: it waits for each
        product before the next. A sound kernel of the Hopper pipeline has none.

    Examples
    --------
    >>> import crossfuse
    >>> kernel = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64")
    >>> kernel.artefact.manifest.resources[0].spill_store_bytes
    0
    """

    kernel: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    stack_bytes: int
    barriers: int
    advisories: tuple[str, ...] = ()

    @property
    def spill_bytes(self) -> int:
        """Bytes that one thread spills and loads back."""
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def complaints(self) -> tuple[str, ...]:
        """What costs time and was not meant: spills, and wgmma that does not overlap."""
        spills = (f"{self.spill_bytes} bytes spilled",) if self.spill_bytes else ()
        return (*spills, *(f"ptxas {number}" for number in self.advisories))

    @property
    def summary(self) -> str:
        """In words, such as ``168 registers, no spills``."""
        return ", ".join((f"{self.registers} registers", *(self.complaints or ("no spills",))))


def parse_resources(log: str) -> tuple[ResourceUsage, ...]:
    """Read the output of ``ptxas -v``: one entry for each entry function.

    Device functions that were not inlined are left out.
    """
    found = []
    for part in re.split(r"Compiling entry function '", log)[1:]:
        kernel = part.split("'", 1)[0]

        def number(pattern: str, text: str = part) -> int:
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        # The frame of the kernel itself, not of a device function printed after it.
        frame = part[max(part.find(f"Function properties for {kernel}\n"), 0) :]
        found.append(
            ResourceUsage(
                kernel,
                registers=number(r"Used (\d+) registers"),
                spill_store_bytes=number(r"(\d+) bytes spill stores", frame),
                spill_load_bytes=number(r"(\d+) bytes spill loads", frame),
                static_shared_bytes=number(r"(\d+) bytes smem"),
                stack_bytes=number(r"(\d+) bytes stack frame", frame),
                barriers=number(r"used (\d+) barriers"),
                advisories=_advisories(log, kernel),
            )
        )
    return tuple(found)


def _advisories(log: str, kernel: str) -> tuple[str, ...]:
    """Numbers C75xx that name a kernel, or no function at all; each once."""
    lines = re.findall(r"\((C75\d\d)\)([^\n]*)", log)
    names = ((number, re.search(r"in (?:the )?function '([^']+)'", rest)) for number, rest in lines)
    return tuple(dict.fromkeys(n for n, name in names if name is None or name[1] == kernel))
