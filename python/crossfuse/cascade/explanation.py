"""What becomes of a cascade, as text and as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.rewrite.tiles import StreamTiles
    from crossfuse.hardware import Device
    from crossfuse.workload.cascade_spec import CascadeSpec


@dataclass(frozen=True)
class CascadeExplanation:
    """A cascade, its derivation, and the stream that is compiled.

    Attributes
    ----------
    workload : str
        Text of the spec.
    derivation : Derivation
        How it streams.
    tiles : StreamTiles | None
        How its axis is shared out; None where no stream of threads computes it.
    reason : str
        Why not; empty where one does.
    """

    workload: str
    derivation: Derivation
    tiles: StreamTiles | None
    reason: str = ""

    def text(self) -> str:
        """As a person would write it down."""
        from crossfuse.cascade.algebra.explain import explain

        how = self.reason
        if self.tiles is not None:
            how = ", ".join(f"{name}={value}" for name, value in asdict(self.tiles).items())
        return f"{self.workload}\n{explain(self.derivation)}\n\nStream: {how}"

    def to_json(self) -> dict[str, Any]:
        """As a value that `json` can write; expressions are sympy's text."""
        slots = [
            {
                "name": each.name,
                "monoid": each.monoid.name,
                "init": str(each.init),
                "carry": str(each.carry),
                "contribution": str(each.contribution),
                "merge": None if each.merge is None else str(each.merge),
                "guard": None if each.guard is None else str(each.guard),
            }
            for each in self.derivation.slots
        ]
        made = {"results": self.derivation.results, "rows": self.derivation.rows}
        return {
            "workload": self.workload,
            "slots": slots,
            **{key: {name: str(each) for name, each in of.items()} for key, of in made.items()},
            "exact": self.derivation.exact,
            "reason": self.derivation.reason,
            "stream": None if self.tiles is None else asdict(self.tiles),
            "not_streamed": self.reason,
        }


def explain_cascade(source: str | CascadeSpec, target: str | Device) -> CascadeExplanation:
    """Derive a packaged cascade and choose its stream.

    Parameters
    ----------
    source : str | CascadeSpec
        Such as ``"R7"`` or ``"softmax:rows=64,cols=1024"``.
    target : str | Device
        ``"nvidia-h100"`` or ``"nvidia-h200"``.

    Returns
    -------
    CascadeExplanation
        Its text and values.

    Raises
    ------
    WorkloadRefused, CascadeRefused
        For what is no cascade, or cannot stream.
    """
    from crossfuse.cascade.algebra import derive
    from crossfuse.cascade.detect import detect
    from crossfuse.cascade.rewrite.choose import choose_tiles
    from crossfuse.errors import CascadeRefused
    from crossfuse.hardware import device
    from crossfuse.workload.cascade_build import prim_func
    from crossfuse.workload.cascades import resolve

    spec = resolve(source) if isinstance(source, str) else source
    (site,) = detect(prim_func(spec))
    derivation = derive(site.cascade)
    try:
        tiles = choose_tiles(site, derivation, device(target))
    except CascadeRefused as error:
        return CascadeExplanation(str(spec), derivation, None, str(error))
    return CascadeExplanation(str(spec), derivation, tiles[0])
