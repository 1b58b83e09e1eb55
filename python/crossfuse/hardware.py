"""What a Hopper GPU allows: limits that legality checks and the lowering hold kernels to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossfuse.calls import checked
from crossfuse.errors import EnvironmentRefused, refuse

if TYPE_CHECKING:
    import tvm

#: Shared memory that one CTA can own on compute capability 9.0, in bytes (227 KiB).
MAX_SHARED_BYTES = 232448

#: Threads of a warp, and of a warpgroup: the four warps that issue wgmma together.
WARP, WARPGROUP = 32, 128

#: CTAs of a cluster, and clusters at once on an H100 SXM (`scripts/calibrate.py`), where groups of
#: SMs hold fewer than all SMs would.
_CLUSTERS = (
    *((3, 39), (4, 30), (5, 22), (6, 17), (7, 15), (8, 15), (9, 9)),
    *((size, 7) for size in range(10, 17)),
)


@checked
@dataclass(frozen=True)
class Device:
    """Limits of one GPU model.

    Attributes
    ----------
    name : str
        Target name, such as ``"nvidia-h100"``.
    arch : str
        nvcc architecture; ``sm_90a`` has wgmma and setmaxnreg.
    sms : int
        Streaming multiprocessors of the SXM part.
    max_shared_bytes : int
        Dynamic shared memory limit of one CTA, in bytes.
    max_cluster, portable_cluster : int
        CTAs in a cluster at most, and at most without the non-portable launch attribute.
    max_threads : int
        Threads in a CTA at most.
    registers : int
        32-bit registers of one SM.
    l2_bytes : int
        L2 cache, in bytes.
    clusters : tuple[tuple[int, int], ...]
        CTAs of a cluster, and clusters that run at the same time with one CTA an SM, where that is
        fewer than the SMs would hold: a cluster stays within a group of SMs (GPC), and some groups
        have fewer. Measured on an H100 SXM; an H200 is taken to be divided likewise.

    Examples
    --------
    >>> device("nvidia-h100").sms
    132
    """

    name: str
    arch: str = "sm_90a"
    sms: int = 132
    max_shared_bytes: int = MAX_SHARED_BYTES
    max_cluster: int = 16
    portable_cluster: int = 8
    max_threads: int = 1024
    registers: int = 65536
    l2_bytes: int = 50 * 2**20
    clusters: tuple[tuple[int, int], ...] = _CLUSTERS

    def resident_clusters(self, size: int) -> int:
        """Clusters of `size` CTAs that run at the same time; the driver has the last word.

        Parameters
        ----------
        size : int
            CTAs of a cluster.

        Returns
        -------
        int
            At least 1.
        """
        share = self.sms // size
        return max(1, min(share, dict(self.clusters).get(size, share)))


DEVICES = {
    each.name: each for each in (Device("nvidia-h100"), Device("nvidia-h200", l2_bytes=60 * 2**20))
}


@checked
def device(name: str | Device) -> Device:
    """Look a device up by its target name.

    Parameters
    ----------
    name : str | Device
        ``"nvidia-h100"`` or ``"nvidia-h200"``; a `Device` is returned as it is.

    Returns
    -------
    Device
        Its limits.

    Raises
    ------
    EnvironmentRefused
        If the device is unknown.

    Examples
    --------
    >>> device("nvidia-h100").max_shared_bytes
    232448
    """
    if isinstance(name, Device):
        return name
    if name not in DEVICES:
        raise refuse(
            EnvironmentRefused,
            "target",
            "device",
            found=repr(name),
            limit=", ".join(DEVICES),
            instead="name one of these targets; clusters and DSM need compute capability 9.0",
        )
    return DEVICES[name]


@checked
def tvm_target(name: str | Device) -> tvm.target.Target:
    """TVM target with the true limits of a device (TVM's own default is 48 KiB of shared memory).

    Parameters
    ----------
    name : str | Device
        See `device`.

    Returns
    -------
    tvm.target.Target
        CUDA target for sm_90a with an LLVM host.

    Examples
    --------
    >>> str(tvm_target("nvidia-h100").arch)
    'sm_90a'
    """
    import tvm

    spec = device(name)
    return tvm.target.Target(
        {
            "kind": "cuda",
            "arch": spec.arch,
            "max_shared_memory_per_block": spec.max_shared_bytes,
            "max_threads_per_block": spec.max_threads,
            "thread_warp_size": 32,
        },
        host="llvm",
    )
