"""What becomes of a cascade, as text and as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.rewrite.tiled.sizes import CascadeTiles
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
    tiles : StreamTiles | CascadeTiles
        How it is shared out among threads, or among tiles of products.
    """

    workload: str
    derivation: Derivation
    tiles: StreamTiles | CascadeTiles

    def text(self) -> str:
        """As a person would write it down."""
        from crossfuse.cascade.algebra.explain import explain

        how = ", ".join(f"{name}={value}" for name, value in asdict(self.tiles).items())
        return f"{self.workload}\n{explain(self.derivation)}\n\n{self._form}: {how}"

    @property
    def _form(self) -> str:
        from crossfuse.cascade.rewrite.tiles import StreamTiles

        of_threads = isinstance(self.tiles, StreamTiles)
        return "Stream of threads" if of_threads else "Stream of tiles (0: chosen)"

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
            "form": self._form.partition(" (")[0],
            "tiles": asdict(self.tiles),
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
    from crossfuse.cascade.rewrite.tiled.choose import choose_product_tiles, has_products
    from crossfuse.hardware import device
    from crossfuse.workload.cascade_build import prim_func
    from crossfuse.workload.cascades import resolve

    spec = resolve(source) if isinstance(source, str) else source
    (site,) = detect(prim_func(spec))
    derivation = derive(site.cascade)
    choose = choose_product_tiles if has_products(site) else choose_tiles
    tiles: Sequence[StreamTiles | CascadeTiles] = choose(site, derivation, device(target))
    return CascadeExplanation(str(spec), derivation, tiles[0])
