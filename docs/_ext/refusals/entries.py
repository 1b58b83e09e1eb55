"""What is known of one error text, and what the reader was doing when it came."""

from __future__ import annotations

from dataclasses import dataclass

FACTS = ("where", "found", "limit", "instead")

#: What the user was doing, with the modules that say no then; the longest prefix counts.
TASKS = {
    "Setting up": (
        "crossfuse._compat",
        "crossfuse.doctor",
        "crossfuse.hardware",
        "crossfuse.runtime.nvcc",
        "crossfuse.bench.environment",
        "crossfuse.cache",
        "crossfuse.files",
    ),
    "Naming a workload": ("crossfuse.workload",),
    "Bringing a model: torch, ONNX, Relax": (
        "crossfuse.importers",
        "crossfuse.models",
        "crossfuse.relax",
        "crossfuse.torch",
    ),
    "Writing a schedule": ("crossfuse.schedule", "crossfuse.blocks.scheduled"),
    "Using a schedule rule": ("crossfuse.schedule.rules", "crossfuse.blocks.chain"),
    "Planning": ("crossfuse.planner", "crossfuse.blocks"),
    "Fusing a cascade of reductions": ("crossfuse.cascade",),
    "Differentiating a function": ("crossfuse.autodiff",),
    "Compiling": (
        "crossfuse._tvm",
        "crossfuse.compiler",
        "crossfuse.runtime.artefact",
        "crossfuse.runtime.launcher",
    ),
    "Lowering a schedule": ("crossfuse.lower",),
    "Lowering tiles to TMA and wgmma": ("crossfuse.lower.hopper",),
    "Lowering a stream of tiles": ("crossfuse.lower.hopper.stream",),
    "Checking a kernel": ("crossfuse.emulate", "crossfuse.workload.tolerances"),
    "Loading and calling a kernel": ("crossfuse.runtime",),
    "Tuning": ("crossfuse.meta_schedule", "crossfuse.planner.tune"),
    "Measuring": ("crossfuse.bench", "crossfuse.measure"),
    "Looking at a kernel": ("crossfuse.view",),
    "Calling the package": ("crossfuse.calls",),
    "At the command line": ("crossfuse.cli",),
}


@dataclass(frozen=True)
class Entry:
    """One error text; what depends on the case stands in angle brackets.

    Attributes
    ----------
    family : str
        Exception class.
    rules : tuple[str, ...]
        Rules that it may name; one, but for a call that chooses.
    where, found, limit, instead : str
        The four other facts of `crossfuse.errors.Refusal`.
    module : str
        Which module raises it.
    """

    family: str
    rules: tuple[str, ...]
    where: str
    found: str
    limit: str
    instead: str
    module: str

    @property
    def told(self) -> str:
        """All that a user reads behind the rule."""
        return f"{self.where}: {self.found}; {self.limit}. {self.instead}"

    @property
    def task(self) -> str:
        """What the user was doing.

        Raises
        ------
        LookupError
            If `TASKS` has no prefix of the module.
        """
        held = [
            (len(prefix), task)
            for task, prefixes in TASKS.items()
            for prefix in prefixes
            if f"{self.module}.".startswith(f"{prefix}.")
        ]
        if not held:
            raise LookupError(f"add {self.module} to TASKS in docs/_ext/refusals/entries.py")
        return max(held)[1]
