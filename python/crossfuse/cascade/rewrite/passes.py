"""Lists what separate kernels would move: the cascade as written, one reduction after another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sympy

    from crossfuse.cascade.site import Site


@dataclass(frozen=True)
class Pass:
    """One kernel of an unfused cascade."""

    #: Of its result.
    name: str
    #: Bytes, as those written.
    read: int
    written: int
    #: Multiplications and additions of its matrix product.
    flops: int = 0


def passes_of(site: Site) -> tuple[Pass, ...]:
    """List the kernels of a cascade that is not fused, in order.

    A product that makes elements is a kernel. Independent reductions share one; each other one
    waits for those that it uses. The left operand of a result with columns is written before it is
    multiplied. Outputs over the axis are the last kernel.
    """
    return tuple(_Counter(site).run())


class _Counter:
    def __init__(self, site: Site) -> None:
        self.site = site
        self.rows = prod(int(site.extents[each]) for each in site.rows)
        self.length = int(site.extents[site.axis])

    def run(self) -> list[Pass]:
        found = [self._made(symbol) for symbol in self.site.producers]
        levels: dict[int, list[str]] = {}
        depth: dict[str, int] = {}
        for stage in self.site.cascade.stages:
            names = {each.name for each in stage.term.free_symbols}
            depth[stage.name] = 1 + max((depth[each] for each in names & depth.keys()), default=0)
            levels.setdefault(depth[stage.name], []).append(stage.name)
        for level in sorted(levels):
            plain = [each for each in levels[level] if not self.site.stages[each].columns]
            found += [self._reduced(plain)] if plain else []
            for name in levels[level]:
                if name not in plain:
                    found += self._multiplied(name)
        return found + self._outputs()

    def _made(self, symbol: sympy.Symbol) -> Pass:
        """The product that makes an element; its result has the type of its operands."""
        from crossfuse.cascade.rewrite.tiled.operands import products

        made = next(each for each in products(self.site) if each.symbol == symbol)
        item = item_bytes(str(made.left.ty))
        count = self.rows * self.length
        read = sum(_bytes(each.source) for each in (made.left, made.right))
        return Pass(self.site.producers[symbol], read, count * item, 2 * count * made.extents[0])

    def _reduced(self, names: list[str]) -> Pass:
        used = set().union(*(self._term(each).free_symbols for each in names))
        return Pass(", ".join(names), self._read(used), 4 * self.rows * len(names))

    def _multiplied(self, name: str) -> list[Pass]:
        """The kernel of the left operand, and the product."""
        columned = self._columned(name)
        used = self._term(name).free_symbols
        columns = prod(int(self.site.extents[each]) for each in self.site.stages[name].columns)
        item = min((self._item_of(each) for each in columned), default=4)
        operand = self.rows * self.length * item
        right = self._read(columned)
        product = Pass(
            name,
            operand + right,
            self.rows * columns * item,
            2 * self.rows * self.length * columns,
        )
        return [Pass(f"operand of {name}", self._read(used - columned), operand), product]

    def _outputs(self) -> list[Pass]:
        rows = self.site.cascade.rows
        if not rows:
            return []
        used = set().union(*(each.free_symbols for each in rows.values()))
        along = [each for each in self.site.outputs if each.name in rows]
        written = sum(_bytes(each.buffer) for each in along)
        return [Pass(", ".join(each.name for each in along), self._read(used), written)]

    def _term(self, name: str) -> sympy.Expr:
        return self.site.cascade.stage(name).term

    def _columned(self, name: str) -> set[sympy.Symbol]:
        from crossfuse.cascade.rewrite.tiled.operands import mentions

        columns = self.site.stages[name].columns
        return {
            symbol
            for symbol in self._term(name).free_symbols & self.site.reads.keys()
            if any(mentions([self.site.reads[symbol]], each) for each in columns)
        }

    def _read(self, symbols: Iterable[sympy.Symbol]) -> int:
        """Bytes of the tensors that symbols are read from, each once."""
        tensors: list[Any] = []
        made = 0
        for symbol in sorted(symbols, key=lambda each: each.name):
            if symbol in self.site.producers:
                made += self.rows * self.length * self._item_of(symbol)
                continue
            for load in self._loads(symbol):
                if not any(load.source.same_as(each) for each in tensors):
                    tensors.append(load.source)
        return made + sum(map(_bytes, tensors))

    def _loads(self, symbol: sympy.Symbol) -> list[Any]:
        from crossfuse import _tvm as ir

        return ir.buffer_loads(self.site.reads[symbol]) if symbol in self.site.reads else []

    def _item_of(self, symbol: sympy.Symbol) -> int:
        if symbol in self.site.producers:
            from crossfuse.cascade.rewrite.tiled.operands import products

            made = next(each for each in products(self.site) if each.symbol == symbol)
            return item_bytes(str(made.left.ty))
        return max((item_bytes(str(each.ty)) for each in self._loads(symbol)), default=4)


def _bytes(buffer: Any) -> int:
    return prod(int(each) for each in buffer.ty.shape) * item_bytes(str(buffer.ty.dtype))


def item_bytes(dtype: str) -> int:
    """Bytes of an element in memory."""
    from crossfuse import _tvm as ir

    return max(1, int(ir.tvm.DataType(dtype).bits) // 8)
