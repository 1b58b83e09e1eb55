"""Places what a CTA keeps in shared memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Region:
    """A piece of shared memory.

    Attributes
    ----------
    name : str
        What it holds.
    offset, size : int
        In bytes.
    """

    name: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.size


@dataclass(frozen=True)
class Arena:
    """Regions one after another.

    Attributes
    ----------
    regions : tuple[Region, ...]
        In ascending order.
    """

    regions: tuple[Region, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all regions."""
        return self.regions[-1].end if self.regions else 0

    def __getitem__(self, name: str) -> Region:
        return next(each for each in self.regions if each.name == name)

    def with_region(self, name: str, size: int, alignment: int) -> Arena:
        """Return an arena that has one more region.

        Parameters
        ----------
        name : str
            What it holds.
        size : int
            Bytes.
        alignment : int
            Of its offset: 1024 for tiles with a 128-byte swizzle, 8 for barriers.
        """
        offset = -(-self.size // alignment) * alignment
        return Arena((*self.regions, Region(name, offset, size)))
