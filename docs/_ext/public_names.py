"""Which names of the package are public, and where each is documented."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

#: Packages that list their names, with what they are for. In the order of the reference.
LISTED = {
    "crossfuse": "The package",
    "crossfuse.workload": "Workloads",
    "crossfuse.compiler": "Compiling",
    "crossfuse.autodiff": "Gradients",
    "crossfuse.relax": "Relax",
    "crossfuse.torch": "PyTorch",
    "crossfuse.emulate": "Checking without a GPU",
    "crossfuse.emulate.cuda": "The emulator and planted faults",
    "crossfuse.runtime": "Kernel libraries",
    "crossfuse.doctor": "What a machine offers",
}

#: Public names of packages that list none.
CHOSEN = {
    "crossfuse.cascade": (
        "crossfuse.cascade.algebra.derive",
        "crossfuse.cascade.spec.Derivation",
        "crossfuse.cascade.detect.detect",
        "crossfuse.cascade.rewrite.streaming.streaming",
        "crossfuse.cascade.rewrite.tiled.tiled.tiled",
        "crossfuse.cascade.run.stream",
        "crossfuse.cascade.spec.Site",
        "crossfuse.cascade.spec.Cascade",
    ),
    "crossfuse.errors": (
        "crossfuse.errors.ArgumentRefused",
        "crossfuse.errors.ArtefactRefused",
        "crossfuse.errors.CascadeRefused",
        "crossfuse.errors.EnvironmentRefused",
        "crossfuse.errors.GradientRefused",
        "crossfuse.errors.LoweringRefused",
        "crossfuse.errors.PlanRefused",
        "crossfuse.errors.ScheduleRefused",
        "crossfuse.errors.WorkloadRefused",
        "crossfuse.errors.refuse",
    ),
    "crossfuse.hardware": ("crossfuse.hardware.Device", "crossfuse.hardware.tvm_target"),
    "crossfuse.measure": ("crossfuse.measure.choice.Measured", "crossfuse.measure.choice.Timed"),
    "crossfuse.meta_schedule": (
        "crossfuse.meta_schedule.builder.NvccBuilder",
        "crossfuse.meta_schedule.candidate.Candidate",
        "crossfuse.meta_schedule.plugs.plugs",
        "crossfuse.meta_schedule.records.Record",
        "crossfuse.meta_schedule.records.read_records",
        "crossfuse.meta_schedule.builder.GpuRunner",
    ),
    "crossfuse.planner": (
        "crossfuse.planner.cost.rates.load",
        "crossfuse.planner.chain.build.chain_of",
        "crossfuse.planner.chain.spec.Chain",
        "crossfuse.planner.choice.Plan",
        "crossfuse.planner.cost.terms.OwnTerm",
        "crossfuse.planner.cost.rates.Rates",
        "crossfuse.planner.cost.rates.rates_of",
        "crossfuse.planner.explain.explanation.Explanation",
        "crossfuse.planner.plan.ranked",
    ),
}

PRIMITIVES = "crossfuse.schedule"
RULES = "crossfuse.schedule.rules"


@dataclass(frozen=True)
class Name:
    """A public name.

    Attributes
    ----------
    path : str
        As it is imported, such as ``crossfuse.relax.FuseChains``.
    package : str
        The page that it is on.
    """

    path: str
    package: str

    @property
    def value(self) -> Any:
        """What it stands for."""
        module, _, name = self.path.rpartition(".")
        return getattr(import_module(module), name)

    @property
    def text(self) -> str:
        """Its docstring; empty where it has none."""
        return getattr(self.value, "__doc__", None) or ""


def public_names() -> list[Name]:
    """Every public name, in the order of the reference; none twice under one path."""
    return list(dict.fromkeys(_names()))


def _names() -> Iterator[Name]:
    for package in LISTED:
        for name in import_module(package).__all__:
            # The package of this name is called like a function, and has its own page.
            if (package, name) != ("crossfuse", "schedule"):
                yield Name(f"{package}.{name}", package)
    yield from _primitives()
    yield from _rules()
    for package, paths in CHOSEN.items():
        for path in paths:
            yield Name(path, package)


def _primitives() -> Iterator[Name]:
    from crossfuse.schedule.install import PRIMITIVES as INSTALLED

    for name, module in INSTALLED.items():
        yield Name(f"{module}.{name}", PRIMITIVES)
    yield Name("crossfuse.schedule.install.add_primitive", PRIMITIVES)
    yield Name("crossfuse.schedule.planned.schedule_workload", PRIMITIVES)


def _rules() -> Iterator[Name]:
    """The functions ``schedule_...`` of the rules, each in the module that defines it."""
    package = import_module(RULES)
    for each in iter_modules(package.__path__):
        module = f"{RULES}.{each.name}"
        for name, value in sorted(vars(import_module(module)).items()):
            if name.startswith("schedule_") and getattr(value, "__module__", "") == module:
                yield Name(f"{module}.{name}", RULES)
