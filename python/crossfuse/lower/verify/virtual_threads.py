"""Virtual threads go through all of a kernel, or none of it."""

from __future__ import annotations

from crossfuse.lower.kernel import ClusterKernel
from crossfuse.lower.refusal import refuse
from crossfuse.markers import thread_tag

_TAG = "vthread"


def check_virtual_threads(kernel: ClusterKernel) -> None:
    """Every store stands inside the virtual threads of its kernel.

    TVM draws a ``vthread`` loop around the whole kernel and repeats for each what stands outside
    it; an accumulation would be done several times.

    Parameters
    ----------
    kernel : ClusterKernel
        A kernel whose buffers are not compacted yet.

    Raises
    ------
    LoweringRefused
        Naming the tag and a store outside.
    """
    tags = {
        thread_tag(loop)
        for use in kernel.uses
        for loop in use.loops
        if thread_tag(loop).startswith(_TAG)
    }
    for tag in sorted(tags):
        for use in kernel.uses:
            if use.write and tag not in map(thread_tag, use.loops):
                raise refuse(
                    "virtual-threads",
                    f"buffer '{use.buffer.name}', statement {use.site.text}",
                    found=f"a store outside {tag}, which other statements of the kernel have",
                    limit="TVM runs the whole kernel in each virtual thread",
                    instead=f"bind a loop around every statement to {tag}, or leave them serial",
                )
