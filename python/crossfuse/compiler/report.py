"""The report about a compiled kernel, as one plain value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.compiler.checks import Verdict
from crossfuse.lower.extract import only_function
from crossfuse.markers import cluster_axis, thread_tag
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

    The metadata are those of `crossfuse.compiler.compiled.Chosen.why`.
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


# A schedule as a person would sketch it: loops with what they are bound to, blocks by name.


def sketch(schedule: Any) -> str:
    """Draw the loop nest of a scheduled function, one line for each loop or block.

    Consecutive serial loops share a line. A block's line names what it writes and reads.
    """
    lines: list[str] = []
    _draw(only_function(schedule).body.block.body, 0, lines)
    return "\n".join(lines)


def _draw(node: Any, depth: int, lines: list[str]) -> None:
    if isinstance(node, ir.SeqStmt):
        for each in node.seq:
            _draw(each, depth, lines)
    elif isinstance(node, ir.For):
        _loop(node, depth, lines)
    elif isinstance(node, ir.SBlockRealize):
        lines.append("  " * depth + _block(node.block))


def _loop(loop: Any, depth: int, lines: list[str]) -> None:
    serial: list[str] = []
    while isinstance(loop, ir.For) and not _binding(loop):
        if ir.constant(loop.extent) != 1:
            serial.append(f"{loop.loop_var.name} < {loop.extent}")
        loop = loop.body
    if serial:
        lines.append("  " * depth + f"for {', '.join(serial)}")
    inside = depth + bool(serial)
    if isinstance(loop, ir.For):
        lines.append("  " * inside + f"for {loop.loop_var.name} < {loop.extent}: {_binding(loop)}")
        _draw(loop.body, inside + 1, lines)
    else:
        _draw(loop, inside, lines)


def _binding(loop: Any) -> str:
    """The binding of a loop; empty for a serial one."""
    axis = cluster_axis(loop)
    if axis is not None:
        return f"CTAs of the cluster, axis {axis}"
    kind = int(loop.kind)
    special = {int(ir.ForKind.VECTORIZED): "vector", int(ir.ForKind.UNROLLED): "unrolled"}
    return thread_tag(loop) or special.get(kind, "")


def _block(block: Any) -> str:
    reads = dict.fromkeys(str(each.source.name) for each in block.reads)
    writes = dict.fromkeys(str(each.source.name) for each in block.writes)
    sources = ", ".join(name for name in reads if name not in writes)
    return (
        f"{', '.join(writes)} <- {sources}" if sources else f"{', '.join(writes)} <- initial value"
    )
