"""Parts of TVMScript functions that tests compare with.

TVM numbers the names in a macro that is used again, so these are for comparisons, which ignore
names, and not for functions that are scheduled by the names of their blocks.
"""

from __future__ import annotations

from tvm.script import tirx as T

#: Annotations of loops that `cluster_bind` has bound.
X, Y, Z = ({"crossfuse.cluster_axis": axis} for axis in "xyz")


@T.macro
def cluster_barrier():
    """A barrier of the cluster, before it has its device function."""
    T.tvm_storage_sync("shared")
    T.tvm_storage_sync("shared.dyn")
    T.cuda.func_call("crossfuse_cluster_sync", source_code="")
