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
    """Regions one after another, and some in the place of others.

    Attributes
    ----------
    regions : tuple[Region, ...]
        In the order in which they were added.
    """

    regions: tuple[Region, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all regions."""
        return max((each.end for each in self.regions), default=0)

    def __contains__(self, name: str) -> bool:
        return any(each.name == name for each in self.regions)

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

    def with_alias(self, name: str, other: str, size: int) -> Arena:
        """Return an arena with a region that begins where another does, at another time.

        Parameters
        ----------
        name : str
            What it holds.
        other : str
            Region that is not used any more then.
        size : int
            Bytes, at most those of the other one.
        """
        return Arena((*self.regions, Region(name, self[other].offset, size)))
