"""A timer of no GPU."""

from __future__ import annotations

from collections.abc import Callable

from crossfuse.measure.job import Taken, Way


class FakeTimer:
    """Answers what it is told, and counts what it is asked.

    `answer` gives the microseconds of a way, or a message where it has none.
    """

    def __init__(
        self,
        answer: Callable[[Way], float | str],
        gpu: str = "NVIDIA H100 80GB HBM3",
        target: str = "nvidia-h100",
    ) -> None:
        self.answer, self.gpu, self.target = answer, gpu, target
        self.asked: list[Way] = []
        self.closed = 0

    def time(self, way: Way) -> Taken:
        self.asked.append(way)
        found = self.answer(way)
        return Taken(message=found) if isinstance(found, str) else Taken(found, found * 0.995)

    def close(self) -> None:
        self.closed += 1
