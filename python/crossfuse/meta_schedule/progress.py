"""Shows progress while candidates are measured: a bar, and the best of each workload so far."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from crossfuse.meta_schedule.records import Record


class Progress:
    """A bar on standard error, with a line above it for each record.

    Where standard error is no terminal, the lines alone are written. `total` is the number of
    records to come.
    """

    def __init__(self, total: int, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self.records: list[Record] = []
        self._total = total
        self._best: dict[str, float] = {}
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Bar(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def add(self, record: Record) -> None:
        """Show a record."""
        from rich.text import Text

        self.records.append(record)
        known = self._best.get(record.candidate.spec)
        time = record.microseconds
        is_best = time is not None and (known is None or time < known)
        if is_best and time is not None:
            self._best[record.candidate.spec] = time
        style = "red" if record.timing is not None and record.timing.fault else ""
        self._console.print(Text(self._line(record, known, is_best), style=style))
        best = self._best.get(record.candidate.spec)
        told = "" if best is None else f"best {best:.2f} us, {record.candidate.spec}"
        self._bar.update(self._task, advance=1, description=told)

    def _line(self, record: Record, known: float | None, is_best: bool) -> str:
        """Such as ``[3/40] gemm:M=8 gemm rows=64: 4.50 us, best so far (was 5.10)``."""
        head = f"[{len(self.records)}/{self._total}] {record.candidate.spec}"
        head = f"{head} {record.candidate.summary}: "
        if record.microseconds is None:
            return f"{head}{record.status}: {record.message}"
        found = f"{head}{record.microseconds:.2f} us"
        if not is_best:
            return found
        return f"{found}, best so far" + ("" if known is None else f" (was {known:.2f})")
