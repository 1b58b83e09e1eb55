"""What ranks of a process group do in tests of windows; the driver's memory is that of the host."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

from cpu.process_groups import main

ROW = 2 << 20
_FIXED = 0x10  # MAP_FIXED


class HostDriver:
    """The driver's calls on memory, with files in memory for that of GPUs."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_uint64
        numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int)
        self._libc.mmap.argtypes = (ctypes.c_uint64, ctypes.c_size_t, *numbers, ctypes.c_long)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 2 if name == self.failing else self._call(name, *arguments)

    def _call(self, name: str, *given: Any) -> int:
        if name == "cuMemCreate":
            assert given[2]._obj.handle_types == 1
            given[0]._obj.value = made = os.memfd_create("row")
            os.ftruncate(made, given[1].value)
        elif name in ("cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"):
            given[0]._obj.value = os.dup(given[1].value)
        elif name == "cuMemRelease":
            os.close(given[0].value)
        elif name == "cuMemAddressReserve":
            kinds = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            given[0]._obj.value = self._libc.mmap(0, given[1].value, 0, kinds, -1, 0)
        elif name == "cuMemMap":
            place, size, _, memory, _ = (each.value for each in given)
            access, kinds = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED
            assert self._libc.mmap(place, size, access, kinds, memory, 0) == place
        return 0


def members() -> Any:
    from crossfuse.runtime.windows import OneOfProcesses

    return OneOfProcesses(None, 0, 30.0)


def rows() -> list[int]:
    """What stands in all rows once each rank has written its own."""
    mine = members()
    mine.check_host()
    before = len(os.listdir("/proc/self/fd"))
    window = mine.window(HostDriver(), ROW)
    assert len(os.listdir("/proc/self/fd")) == before
    words = [ctypes.c_int.from_address(window.address + each * ROW) for each in range(mine.count)]
    words[mine.rank].value = 7 + mine.rank
    mine.gather(None)
    return [each.value for each in words]


def _refused(step: Any) -> str:
    from crossfuse.errors import RefusedError

    try:
        step()
    except RefusedError as error:
        return str(error)
    return "nothing"


def no_memory() -> str:
    """One rank has none."""
    mine = members()
    return _refused(lambda: mine.window(HostDriver("cuMemCreate" if mine.rank else ""), ROW))


def no_way() -> str:
    """One rank cannot map what the other has."""
    mine = members()
    name = "cuMemImportFromShareableHandle"
    return _refused(lambda: mine.window(HostDriver("" if mine.rank else name), ROW))


def hosts() -> str:
    """Ranks on several hosts."""
    from crossfuse.runtime import windows as module

    mine = members()
    here, module.host = module.host, lambda: (f"boot {mine.rank}", f"node{mine.rank}")
    try:
        return _refused(mine.check_host)
    finally:
        module.host = here


def no_gpu() -> str:
    """A group of processes without GPUs."""
    from crossfuse.runtime import PeerGroup

    return _refused(PeerGroup.from_process_group)


def not_a_member() -> str:
    """A process that is not in a group."""
    import torch.distributed as dist

    from crossfuse.runtime import PeerGroup

    group = dist.new_group([0])
    return _refused(lambda: PeerGroup.from_process_group(group)) if dist.get_rank() else ""


if __name__ == "__main__":
    main(rows, no_memory, no_way, hosts, no_gpu, not_a_member)
