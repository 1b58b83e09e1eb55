"""Sizes of a stream: CTAs, threads, and elements that a thread takes in at a time."""

from __future__ import annotations

from dataclasses import dataclass

from crossfuse.calls import checked
from crossfuse.errors import CascadeRefused, RefusedError, refuse
from crossfuse.hardware import Device
from crossfuse.markers import MAX_CLUSTER
from crossfuse.schema import Count, Tile


def refused(where: str, found: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a rewriting; see `crossfuse.errors.Refusal`."""
    return refuse(
        CascadeRefused, "cascade-stream", where, found=found, limit=limit, instead=instead
    )


MAX_THREADS = Device("").max_threads
#: Where elements stay for outputs over the axis.
RESIDENCES = ("registers", "shared", "none")


@checked
@dataclass(frozen=True)
class StreamTiles:
    """Sizes of a stream."""

    #: Threads of a CTA that share one row: a power of two, 1 to 1024.
    threads: Tile = 256
    #: Elements of a thread side by side; 0: as many as one load of 16 bytes takes of the narrowest
    #: element that is streamed.
    vector: Tile = 0
    #: Vectors of a thread that one step of the stream takes in.
    unroll: Tile = 4
    #: CTAs that share one row, 1 to 16; their states merge through distributed shared memory.
    cluster: Tile = 1
    #: Rows of a CTA, side by side; a divisor of the number of rows.
    rows: Tile = 1
    #: Where elements stay until outputs over the axis are computed: ``"registers"``, ``"shared"``,
    #: or ``"none"``, which loads them again.
    resident: str = "none"
    #: Least number of CTAs that a multiprocessor is to hold, 0 for as many as registers allow; more
    #: make the compiler use fewer registers.
    ctas: Count = 0

    def check(self, rows: int) -> None:
        """Refuse sizes that no kernel of a cascade of some rows can have."""
        sizes = {name: getattr(self, name) for name in ("threads", "unroll", "cluster", "rows")}
        for name, size in sizes.items():
            if size < 1:
                raise refused(f"tiles, {name}", size, "1 or more", f"pass a positive {name}")
        if self.threads & (self.threads - 1) or self.threads * self.rows > MAX_THREADS:
            raise refused(
                "tiles, threads",
                f"{self.threads} threads for each of {self.rows} rows",
                f"a power of two, {MAX_THREADS} in a CTA at most",
                "pass fewer threads or fewer rows",
            )
        if self.cluster > MAX_CLUSTER or (self.cluster > 1 and self.rows > 1):
            raise refused(
                "tiles, cluster",
                f"{self.cluster} CTAs for {self.rows} rows",
                f"{MAX_CLUSTER} CTAs, and one row where there are several",
                f"pass cluster=1, or rows=1 and at most {MAX_CLUSTER} CTAs",
            )
        if rows % self.rows:
            raise refused(
                "tiles, rows",
                f"{self.rows} rows of a CTA, of {rows}",
                "a divisor of the number of rows",
                "pass rows=1",
            )
        if self.resident not in RESIDENCES:
            limit = ", ".join(RESIDENCES)
            raise refused("tiles, resident", repr(self.resident), limit, "pass one of these")
