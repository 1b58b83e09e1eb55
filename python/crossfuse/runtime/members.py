"""Who the ranks of a group are: GPUs of this process, or processes of which each has one."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

from crossfuse.errors import EnvironmentRefused, RefusedError, Rule
from crossfuse.runtime.windows import (
    Driver,
    Memory,
    Window,
    create,
    descriptor_of,
    memory_of,
    release,
)

_refused = Rule(EnvironmentRefused, "peer-group")

Result = TypeVar("Result")


class Members(Protocol):
    """The ranks of a group, as one process sees them."""

    #: How many there are, in all processes.
    count: int
    #: GPUs of those that this process launches, by rank.
    local: Mapping[int, int]

    def window(self, driver: Driver, row_bytes: int) -> Window:
        """Make a window with a row in the memory of each rank; all processes call it together."""
        ...

    def together(self, step: Callable[[], Result]) -> Result:
        """Take a step that all processes take, and go on once all have; one's refusal is all's."""
        ...


class OneProcess:
    """Ranks that are GPUs of this process."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.count = len(devices)
        self.local: Mapping[int, int] = dict(enumerate(devices))

    def window(self, driver: Driver, row_bytes: int) -> Window:
        """See `Members.window`."""
        devices = [*self.local.values()]
        rows = (create(driver, each, row_bytes) for each in devices)
        return Window(driver, rows, row_bytes, self.count, devices)

    def together(self, step: Callable[[], Result]) -> Result:
        """See `Members.together`."""
        return step()


class OneOfProcesses:
    """A rank that is this process, in a process group of ``torch.distributed``.

    Memory goes from process to process as file descriptors, through sockets of the host: that works
    without rights to look into other processes, and keeps windows what they are in one process.
    Processes wait `timeout` seconds for each other, beside what the process group itself waits.
    """

    def __init__(self, group: Any, device: int, timeout: float) -> None:
        import torch.distributed as dist

        self._group = group
        self._timeout = timeout
        self.count = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.local: Mapping[int, int] = {self.rank: device}

    def gather(self, value: Any) -> list[Any]:
        """What each rank has in the place of a value."""
        import torch.distributed as dist

        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self._group)
        return found

    def check_host(self) -> None:
        """Refuse ranks on several hosts."""
        hosts = self.gather(host())
        if len({boot for boot, _ in hosts}) > 1:
            raise _refused(
                "process group",
                found=f"ranks on hosts {', '.join(dict.fromkeys(name for _, name in hosts))}",
                limit="GPUs of one host",
                instead="make a process group of each host's ranks (torch.distributed.new_group), "
                "and leave what lies between hosts to NCCL",
            )

    def together(self, step: Callable[[], Result]) -> Result:
        """See `Members.together`."""
        made, refusal = None, None
        try:
            made = step()
        except RefusedError as error:
            refusal = error
        texts = self.gather(None if refusal is None else str(refusal))
        if refusal is not None:
            raise refusal
        for rank, text in enumerate(texts):
            if text is not None:
                raise _refused(
                    f"rank {rank}",
                    found=text,
                    limit="memory and GPUs as all ranks of a group need them",
                    instead="see what that rank was refused for",
                )
        return made  # type: ignore[return-value]

    def window(self, driver: Driver, row_bytes: int) -> Window:
        """See `Members.window`."""
        (device,) = self.local.values()
        own, descriptor = self.together(lambda: _shown(driver, device, row_bytes))
        with ExitStack() as stack:
            stack.callback(os.close, descriptor)
            listener = stack.enter_context(_listener(self.count))
            addresses = self.gather(listener.getsockname())

            def made() -> Window:
                given = self._exchanged(listener, addresses, descriptor)
                for each in given.values():
                    stack.callback(os.close, each)
                rows = self._rows(driver, own, given)
                return Window(driver, rows, row_bytes, self.count, (device,))

            return self.together(made)

    def _rows(self, driver: Driver, own: Memory, given: Mapping[int, int]) -> Iterator[Memory]:
        for rank in range(self.count):
            yield own if rank == self.rank else memory_of(driver, given[rank])

    def _exchanged(
        self, listener: socket.socket, addresses: Sequence[bytes], own: int
    ) -> dict[int, int]:
        """File descriptors of all other ranks, each of which gets the own one.

        Nobody waits for another to accept: what is sent fits the buffers.
        """
        listener.settimeout(self._timeout)
        found: dict[int, int] = {}
        try:
            for rank, address in enumerate(addresses):
                if rank != self.rank:
                    with socket.socket(socket.AF_UNIX) as peer:
                        peer.settimeout(self._timeout)
                        peer.connect(address)
                        socket.send_fds(peer, [self.rank.to_bytes(2, "little")], [own])
            while len(found) < self.count - 1:
                peer, _ = listener.accept()
                with peer:
                    peer.settimeout(self._timeout)
                    word, descriptors, *_ = socket.recv_fds(peer, 2, 1)
                    found[int.from_bytes(word, "little")] = descriptors[0]
        except OSError as error:
            for each in found.values():
                os.close(each)
            missing = sorted(set(range(self.count)) - {self.rank, *found})
            raise _refused(
                f"rank {self.rank}",
                found=f"no memory of ranks {', '.join(map(str, missing))}: {error}",
                limit="processes of one host and one network namespace",
                instead="run all ranks in one container, or leave collectives to NCCL",
            ) from None
        return found


def host() -> tuple[str, str]:
    """What tells hosts apart, and the name of this one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname()
    return (boot.read_text(encoding="ascii").strip() if boot.is_file() else name), name


def _listener(count: int) -> socket.socket:
    """A socket to which as many processes of the host connect; the kernel gives it an address."""
    made = socket.socket(socket.AF_UNIX)
    made.bind("")
    made.listen(count)
    return made


def _shown(driver: Driver, device: int, size: int) -> tuple[Memory, int]:
    """Memory of the own GPU, and the descriptor by which others map it."""
    memory = create(driver, device, size, shared=True)
    try:
        return memory, descriptor_of(driver, memory)
    except RefusedError:
        release(driver, memory)
        raise
