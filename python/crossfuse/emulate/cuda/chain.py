"""Kernel images that run one after another on the same buffers, as one image.

Each text has a namespace of its own, and kernels that share a name are numbered. An image that
comes several times is in the text once, and keeps its workspaces and state, as a library does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from crossfuse.calls import checked
from crossfuse.emulate.cuda.build import HEADERS
from crossfuse.errors import CheckFailed, RefusedError, refuse
from crossfuse.lower.image import BufferSpec, KernelImage, Launch

_NAME = "chain"


@dataclass(frozen=True)
class Link:
    """An image of a chain, and what its buffers are called there.

    Attributes
    ----------
    image : KernelImage
        A lowered function.
    buffers : Mapping[str, str]
        Names in the chain by the image's own names; others are the same in both.

    Examples
    --------
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.threads import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func
    >>> image = lower(schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=64")), cluster=4)).image
    >>> Link(image, {"A": "hidden", "out": "result"}).buffers["A"]
    'hidden'
    """

    image: KernelImage
    buffers: Mapping[str, str] = field(default_factory=dict)


@checked
def chain(links: Sequence[Link]) -> KernelImage:
    """Put images one behind the other: what one writes, later ones read by the same name.

    Each output is one of the chain, the intermediates too. What no link writes is an input. The
    text is for `emulate`.

    Parameters
    ----------
    links : sequence of Link
        In the order of their calls.

    Returns
    -------
    KernelImage
        All launches, on the buffers of the chain.

    Raises
    ------
    CheckFailed
        If there is no link, one names a buffer that its image does not have, a buffer has another
        shape or dtype in two of them, a link writes what an earlier one has read as an input of the
        chain, or an image takes fewer rows than it has.

    Examples
    --------
    >>> from crossfuse.emulate.cuda import emulate
    >>> from crossfuse.lower.extract import lower
    >>> from crossfuse.schedule.rules.threads import schedule_split_k
    >>> from crossfuse.workload import parse, prim_func, random_inputs
    >>> spec = parse("gemm:M=16,K=64,N=64")
    >>> image = lower(schedule_split_k(prim_func(spec), cluster=4)).image
    >>> twice = chain([Link(image, {"out": "hidden"}), Link(image, {"A": "hidden"})])
    >>> [each.name for each in twice.buffers if each.output], len(twice.launches)
    (['hidden', 'out'], 2)
    >>> emulate(twice, random_inputs(spec)).ok
    True
    """
    if not links:
        raise _unfit("no link", "at least one")
    images = list(dict.fromkeys(each.image for each in links))
    numbers = [images.index(each.image) for each in links]
    return KernelImage(
        _NAME,
        _includes(images) + "".join(_text(image, number) for number, image in enumerate(images)),
        _buffers(links),
        tuple(
            _launch(launch, link, number)
            for number, link in zip(numbers, links, strict=True)
            for launch in link.image.launches
        ),
        tuple(_own(each, n) for n, image in enumerate(images) for each in image.workspaces),
        tuple(_own(each, n) for n, image in enumerate(images) for each in image.state),
    )


def _buffers(links: Sequence[Link]) -> tuple[BufferSpec, ...]:
    """Arguments of the chain: inputs, then outputs, each in the order in which it comes first."""
    found: dict[str, BufferSpec] = {}
    for link in links:
        if link.image.rows is not None:
            raise _unfit(f"{link.image.name}, which takes fewer rows", "images of all rows")
        names = [each.name for each in link.image.buffers]
        for unknown in [each for each in link.buffers if each not in names]:
            raise _unfit(f"{unknown} in a link of {link.image.name}", ", ".join(names))
        for buffer in link.image.buffers:
            name = link.buffers.get(buffer.name, buffer.name)
            known = found.setdefault(name, replace(buffer, name=name))
            if (known.shape, known.dtype) != (buffer.shape, buffer.dtype):
                shapes = (f"{list(each.shape)} of {each.dtype}" for each in (known, buffer))
                raise _unfit(f"{name} with {' and '.join(shapes)}", "one shape and dtype")
            if buffer.output and not known.output:
                raise _unfit(f"{name}, written behind a link that reads it", "inputs left alone")
    outputs = [each for each in found.values() if each.output]
    return (*(each for each in found.values() if not each.output), *outputs)


def _launch(launch: Launch, link: Link, number: int) -> Launch:
    own = {each.name for each in (*link.image.workspaces, *link.image.state)}
    maps = {each.name for each in launch.tensor_maps}

    def called(name: str) -> str:
        return _numbered(name, number) if name in own else link.buffers.get(name, name)

    return replace(
        launch,
        symbol=_numbered(launch.symbol, number),
        arguments=tuple(each if each in maps else called(each) for each in launch.arguments),
        tensor_maps=tuple(replace(e, buffer=called(e.buffer)) for e in launch.tensor_maps),
    )


def _own(buffer: BufferSpec, number: int) -> BufferSpec:
    return replace(buffer, name=_numbered(buffer.name, number))


def _numbered(name: str, number: int) -> str:
    return f"{name}__{number}"


def _includes(images: Sequence[KernelImage]) -> str:
    """CUDA's headers, whose names are of no link."""
    found = (name for each in images for name in re.findall(r"#\s*include <(.*)>", each.cuda))
    return "".join(f"#include <{n}>\n" for n in dict.fromkeys(found) if (HEADERS / n).exists())


def _text(image: KernelImage, number: int) -> str:
    text = image.cuda
    for symbol in dict.fromkeys(launch.symbol for launch in image.launches):
        named = rf"\g<1>{_numbered(symbol, number)}\g<2>"
        text = re.sub(rf"(__global__[^;{{]*?\b){re.escape(symbol)}(\s*\()", named, text)
    # A text may overload functions that it shares with others. What a preprocessor's guard leaves
    # out of a later text is found in the first one.
    space = f"crossfuse_link_{number}"
    shared = "using ::max;\nusing ::min;"
    return f"namespace {space} {{\n{shared}\n{text}\n}}\nusing namespace {space};\n"


def _unfit(found: str, limit: str) -> RefusedError:
    return refuse(
        CheckFailed,
        "emulate-chain",
        _NAME,
        found=found,
        limit=limit,
        instead="name the buffers of each link as the chain has them (Link.buffers)",
    )
