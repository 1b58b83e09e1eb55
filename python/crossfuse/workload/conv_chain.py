"""A chain of two convolutions, as a value and as text.

```
conv_chain:batch=1,H=56,W=56,IC=64,OC1=64,OC2=256,k1=3,k2=1,dtype=bfloat16,act=relu
```

As an implicit matrix product, a convolution multiplies the windows of the image, one row for each
pixel, by its weights. A window reads row after row of its pixels, each with all channels, so that
element ``(r * k + s) * channels + c`` of the reduction is channel c of pixel (r, s).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse.calls import checked
from crossfuse.errors import RefusedError
from crossfuse.workload.dtypes import Operand
from crossfuse.workload.spec import WorkloadSpec, check_given, read_extent, refused

if TYPE_CHECKING:
    import numpy as np

KIND = "conv_chain"
#: Extents of a chain that have no default.
EXTENTS = ("batch", "H", "W", "IC", "OC1", "OC2", "k1")
_WORDS = ("dtype", "act", "weights", "out", "bias", "scale", "residual")
#: Every key of the text.
KEYS = (*EXTENTS, "k2", "stride", *_WORDS)


@checked
@dataclass(frozen=True)
class ConvChainSpec(WorkloadSpec):
    """Two convolutions of stride 1 over NHWC images, padded so that images keep their extents.

    ``hidden = act(conv(X, B)); out = conv(hidden, D)``: as matrices, C[M,N] = act(windows of X @ B)
    and E[M,L] = C @ D, where row ``(n * H + y) * W + x`` is pixel (y, x) of image n. The output is
    such a matrix: in memory, it is the NHWC tensor [batch, H, W, OC2].

    Make one by `conv_chain`, which works out the extents of the matrices.

    Attributes
    ----------
    batch, H, W : int
        Images, their rows and columns; M is their product.
    k1 : int
        Rows and columns of the first convolution's window, odd; K is k1 * k1 * IC. The second
        one's window is one pixel.
    weights : str
        ``"nk"`` unless given: B is [OC1, k1 * k1 * IC] and D [OC2, OC1], as torch stores the
        weights of convolutions in channels_last. ``"kn"``: [k1 * k1 * IC, OC1] and [OC1, OC2].

    Raises
    ------
    WorkloadRefused
        Extents that are not positive, that do not make up the matrices, or an even window.

    Examples
    --------
    >>> from crossfuse.workload import lookup
    >>> spec = lookup("C1")
    >>> isinstance(spec, ConvChainSpec), spec.k1, spec.M
    (True, 1, 3136)
    """

    kinds: ClassVar[tuple[str, ...]] = (KIND,)

    batch: int = 1
    H: int = 0
    W: int = 0
    k1: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "H", "W", "k1"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise _refused(name, value, "a positive integer", f"write {name}=1, say")
        if self.k1 % 2 == 0:
            limit = "odd windows, which have a pixel in the middle"
            raise _refused("k1", self.k1, limit, f"pad the weights to k1={self.k1 + 1}")
        super().__post_init__()
        pixels, window = self.batch * self.H * self.W, self.k1 * self.k1
        if pixels != self.M or self.K % window:
            raise _refused(
                "M",
                f"{self.M} rows of {self.K}",
                f"{pixels} rows, one for each pixel, of a multiple of {window}",
                "change batch, H, W and k1, which say how many there are",
            )

    @property
    def IC(self) -> int:
        """Channels of the input."""
        return self.K // (self.k1 * self.k1)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """X, B and D, see the class, then what the epilogues read."""
        shape = (self.batch, self.H, self.W, self.IC)
        return (Operand("X", shape, self.dtype), *super().operands[1:])

    def __str__(self) -> str:
        """Canonical text; `crossfuse.workload.parse` reads it back to an equal spec."""
        values = {name: getattr(self, name) for name in ("batch", "H", "W", "IC")}
        values |= {"OC1": self.N, "OC2": self.L, "k1": self.k1, "k2": 1}
        values |= {"dtype": self.dtype, "act": self.act}
        if self.weights != "nk":
            values["weights"] = self.weights
        if self.out != self.dtype:
            values["out"] = self.out
        further = {name: getattr(self, name) for name in ("bias", "scale", "residual")}
        values |= {name: value for name, value in further.items() if value}
        return f"{KIND}:" + ",".join(f"{name}={value}" for name, value in values.items())


def conv_chain(
    *,
    batch: int,
    H: int,
    W: int,
    IC: int,
    OC1: int,
    OC2: int,
    k1: int,
    k2: int = 1,
    stride: int = 1,
    **words: str,
) -> ConvChainSpec:
    """The spec of a chain of two convolutions.

    There are `batch` images of H rows and W columns, with IC channels at first, OC1 between the
    convolutions and OC2 at the end. Windows have k1 and k2 rows and columns; k1 is odd. A k2 or a
    stride other than 1 raises `WorkloadRefused`, as `ConvChainSpec` does for what else it does not
    take. `words` are fields of `ConvChainSpec`.
    """
    if k2 != 1:
        limit = "1, because each CTA has the pixels of its own tile of the intermediate alone"
        raise _refused("k2", k2, limit, "make the second convolution a chain of its own")
    if stride != 1:
        limit = "1, because rows of the output are taken from pixels that follow one another"
        raise _refused("stride", stride, limit, "leave stride out")
    return ConvChainSpec(
        KIND,
        M=batch * H * W,
        K=k1 * k1 * IC,
        N=OC1,
        L=OC2,
        batch=batch,
        H=H,
        W=W,
        k1=k1,
        **words,
    )


def from_options(options: dict[str, str]) -> ConvChainSpec:
    """Make a spec from text values by key, of `KEYS`.

    Refuses as `conv_chain`, and for missing extents.
    """
    check_given(KIND, EXTENTS, options, 1, "what you mean")
    values: dict[str, Any] = {
        name: text if name in _WORDS else read_extent(KIND, name, text)
        for name, text in options.items()
    }
    return conv_chain(**values)


def windows(images: np.ndarray, k: int) -> np.ndarray:
    """Write windows of images [batch, H, W, channels] side by side, with zeros beyond the images.

    The result is [batch * H * W, k * k * channels]: a row for each pixel. `k` is odd.
    """
    import numpy as np

    batch, height, width, channels = images.shape
    rim = (k // 2, k // 2)
    padded = np.pad(images, ((0, 0), rim, rim, (0, 0)))
    shifted = [padded[:, r : r + height, s : s + width] for r in range(k) for s in range(k)]
    return np.stack(shifted, axis=3).reshape(batch * height * width, k * k * channels)


def _refused(name: str, found: object, limit: str, instead: str) -> RefusedError:
    return refused("workload-extent", f"{KIND}:{name}", found, limit, instead)
