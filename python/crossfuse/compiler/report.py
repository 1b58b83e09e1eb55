"""The report about a compiled kernel, as one plain value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.compiler.checks import Verdict
from crossfuse.measure.choice import Measured
from crossfuse.planner.explain.tables import tiles_text
from crossfuse.schema import typed

if TYPE_CHECKING:
    from crossfuse.compiler.compiled import Compiled
    from crossfuse.compiler.measure import Timing


@dataclass(frozen=True)
class KernelReport:
    """Facts about a compiled kernel, for people and scripts."""

    #: Summary of what it computes.
    workload: str
    #: Device name.
    target: str
    #: Sketch of its loops and blocks; the manifest has the trace.
    schedule: str
    #: Picture of which CTA holds what.
    layout: str
    #: Grid, block, cluster and dynamic shared bytes of each kernel.
    launches: tuple[dict[str, Any], ...]
    #: Placements: name, offset, size, barrier intervals.
    shared_memory: tuple[dict[str, Any], ...]
    #: Bytes of a CTA used and allowed.
    shared_total: int
    shared_limit: int
    #: Cluster barriers in the generated code.
    barriers: int
    #: Registers and spills of each kernel.
    resources: tuple[dict[str, Any], ...]
    #: Paths.
    shared_object: str
    manifest: str
    verdicts: tuple[Verdict, ...] = ()
    #: None unless it was measured.
    timing: Timing | None = None
    #: Family, tiles and estimated microseconds, and those of not fusing, if it follows a plan.
    plan: dict[str, Any] | None = None
    #: What was planned, or why nothing was; a second line says what was measured.
    choice: str = ""

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(each.status != "failed" for each in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """As a value that `json` can write."""
        return asdict(self) | {"ok": self.ok}


def make_report(
    compiled: Compiled, verdicts: Sequence[Verdict] = (), timing: Timing | None = None
) -> KernelReport:
    """Collect what is known about a compiled kernel, with checks and timing if they ran."""
    from crossfuse.compiler.sketch import sketch
    from crossfuse.schedule.cluster_layout import cluster_layout

    image, plan = compiled.lowered.image, compiled.lowered.shared_memory
    metadata = compiled.artefact.manifest.metadata
    return KernelReport(
        workload=compiled.source.summary,
        target=compiled.target.name,
        schedule=sketch(compiled.schedule),
        layout=cluster_layout(compiled.schedule).picture(),
        launches=tuple(asdict(each) for each in image.launches),
        shared_memory=tuple(asdict(each) for each in plan.placements),
        shared_total=plan.total,
        shared_limit=compiled.target.max_shared_bytes,
        barriers=image.cuda.count("crossfuse_cluster_sync();"),
        resources=tuple(asdict(each) for each in compiled.artefact.manifest.resources),
        shared_object=str(compiled.artefact.shared_object),
        manifest=str(compiled.artefact.manifest_path),
        verdicts=tuple(verdicts),
        timing=timing,
        plan=metadata.get("plan"),
        choice=choice_text(metadata),
    )


def choice_text(why: Mapping[str, Any]) -> str:
    """Say why this kernel was built, from its library's metadata; empty if the caller scheduled it.

    The metadata are those of `crossfuse.compiler.choose.Chosen.why`.
    """
    if "measured" in why:
        rest = {key: each for key, each in why.items() if key != "measured"}
        return f"{choice_text(rest)}\n{typed(Measured, why['measured']).text}".strip()
    if "plan" in why:
        return _planned(why["plan"])
    if "recorded" in why:
        found = why["recorded"]
        return f"recorded: {found['microseconds']:.1f} us measured, in {found['database']}"
    if why.get("rule") == "threads":
        refused = "; ".join(why.get("refused", ()))
        because = f", since the Hopper pipeline has none: {refused}" if refused else ""
        return f"not planned: a kernel of ordinary instructions{because}"
    return f"not planned: {why['not_planned']}" if "not_planned" in why else ""


def _planned(plan: Mapping[str, Any]) -> str:
    eager = plan["eager_microseconds"]
    text = f"planned: {plan['family']}, {plan['microseconds']:.1f} us estimated"
    if eager is not None:
        text += f", not to fuse {eager:.1f} us"
    if plan["eager_is_faster"]:
        text += ", which is faster: the best fused kernel is compiled since one was asked for"
    return f"{text}; {tiles_text(plan['tiles'])}"
