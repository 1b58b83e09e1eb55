"""Gradients of cascades of rows as values.

```
rmsnorm:rows=4096,cols=16384,grad
softmax:rows=4096,cols=32768,dtype=float32,grad=true
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from crossfuse.workload import cascade_spec
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.dtypes import Operand
from crossfuse.workload.refusal import refused

#: The key of specs that asks for the gradient.
KEY = "grad"
#: What has a gradient that is a cascade of rows again, with parameters that it does not read: those
#: that are only added.
_DERIVED: Mapping[type[CascadeSpec], tuple[str, ...]] = {
    cascade_spec.Softmax: (),
    cascade_spec.LogSoftmax: (),
    cascade_spec.CrossEntropy: (),
    cascade_spec.LayerNorm: ("bias",),
    cascade_spec.RmsNorm: (),
    cascade_spec.Variance: (),
}
#: Names of these cascades.
KINDS = tuple(each.kind for each in _DERIVED)


@dataclass(frozen=True, kw_only=True)
class RowsGradient(CascadeSpec):
    """The gradient of a cascade by its rows ``x``, from gradients of its outputs.

    It takes what the cascade takes, but for parameters that are only added, then ``d_`` and the
    name of each output; it gives ``d_x``. That of a residual is the same one. Types are those of
    what they are gradients of.
    """

    kind: ClassVar[str] = "gradient"

    #: What is differentiated.
    of: CascadeSpec

    def __post_init__(self) -> None:
        if type(self.of) not in _DERIVED:
            where, found = f"{self.of.kind}:{KEY}", f"the gradient of {self.of.kind}"
            limit = f"gradients of {', '.join(KINDS)}"
            instead = "differentiate its function by crossfuse.autodiff.gradients, and compile that"
            raise refused("workload-grad", where, found, limit, instead)
        object.__setattr__(self, "dtype", self.of.dtype)
        object.__setattr__(self, "out", self.of.dtype)
        super().__post_init__()

    @property
    def masked(self) -> bool:  # type: ignore[override]
        """Whether rows may have -inf in them."""
        return self.of.masked

    @property
    def operands(self) -> tuple[Operand, ...]:
        """What the cascade takes and its gradient reads, and gradients of outputs."""
        added = _DERIVED[type(self.of)]
        read = (each for each in self.of.operands if each.name not in added)
        given = (Operand(f"d_{each.name}", each.shape, each.dtype) for each in self.of.outputs)
        return (*read, *given)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The gradient of the rows."""
        rows = self.of.operands[0]
        return (Operand(f"d_{rows.name}", rows.shape, rows.dtype),)

    @property
    def count(self) -> int:
        """Rows, which do not depend on each other."""
        return self.of.count

    def with_count(self, count: int) -> RowsGradient:
        """The same gradient of another number of rows."""
        return RowsGradient(of=self.of.with_count(count))

    def __str__(self) -> str:
        """The cascade's text, and that its gradient is meant."""
        return f"{self.of},{KEY}=true"
