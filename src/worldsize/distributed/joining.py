"""Forms torch's process group: waits for late processes and for the host name of rank 0, names what is missing, and
explains failures."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from worldsize.distributed import cpp_messages
from worldsize.distributed.rank import RankInfo
from worldsize.errors import PeersUnreachable, UserError, first_line

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store, TCPStore

# A process that is later is named. Importing torch from a cold disk takes about as long.
_LATE_S = 15.0
_POLL_S = 0.2
_LISTED = 8  # ranks in a message
# Keys of the store: how many have come; with a rank, that it has; and that all have.
_COUNT, _COMPLETE = "worldsize/joined", "worldsize/complete"


def init_process_group(rank_info: RankInfo, backend: str, timeout: timedelta, device: torch.device | None) -> None:
    """Join the process group of the run; what comes late is waited for and printed.

    Args:
        timeout: of the wait for the name of rank 0's host, of that for the processes, and later of each message.
        device: the GPU of this process that the group is bound to, if any.

    Raises:
        PeersUnreachable: the name stayed unknown, or not all processes came.
        UserError: the port is in use.
    """
    import torch.distributed as dist

    assert rank_info.master is not None
    address, port = rank_info.master
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    _wait_for_name(rank_info, timeout)
    with _own_stderr() as stderr, cpp_messages.held_back() as discard:
        try:
            dist.init_process_group(
                backend,
                store=_store(rank_info, timeout, stderr),
                rank=rank_info.rank,
                world_size=rank_info.size,
                timeout=timeout,
                device_id=device,
            )
        except dist.DistBackendError as error:
            from worldsize.distributed.device_errors import nccl

            raise nccl(str(error), rank_info.rank) from None
        except RuntimeError as error:
            if not isinstance(error, (dist.DistNetworkError, dist.DistStoreError)) and not _in_use(error):
                raise
            discard()
            raise _not_connected(rank_info, error, timeout) from None


def _wait_for_name(rank_info: RankInfo, timeout: timedelta) -> None:
    """Wait until the name of rank 0's host resolves: that of a new pod takes a while to become known."""
    assert rank_info.master is not None
    address, port = rank_info.master
    deadline = time.monotonic() + timeout.total_seconds()
    announced = False
    while True:
        try:
            socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            return
        except (socket.gaierror, UnicodeError) as error:  # no host name: a label is empty, or too long
            reason = error.strerror if isinstance(error, socket.gaierror) else first_line(error)
        if time.monotonic() > deadline:
            raise PeersUnreachable(
                f"rank {rank_info.rank}: {address}, the host of rank 0, is unknown after {timeout.total_seconds():g} s "
                f"({reason}): check MASTER_ADDR and the name service (DNS, /etc/hosts) of {socket.gethostname()}"
            )
        if not announced:
            _say(2, rank_info, f"waiting for {address}, the host of rank 0, to become known ({reason})")
            announced = True
        time.sleep(_POLL_S)


def _store(rank_info: RankInfo, timeout: timedelta, stderr: int) -> Store:
    """Where the processes meet: on rank 0, or in the store of torchrun's agents, which have met before.

    Args:
        stderr: where to print who is late.
    """
    from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        own, _, _ = next(rendezvous("env://", rank_info.rank, rank_info.size, timeout=timeout))
        return PrefixStore("default_pg", own)
    assert rank_info.master is not None
    address, port = rank_info.master
    late = threading.Timer(_LATE_S, _say, (stderr, rank_info, f"waiting for rank 0 at {address}:{port}"))
    late.daemon = True
    late.start()
    try:
        own = TCPStore(
            address,
            port,
            rank_info.size,
            is_master=rank_info.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # as torch's own: a run may follow another one in the same processes
        )
    finally:
        late.cancel()
    own.set(_key(rank_info.rank), "")
    own.add(_COUNT, 1)
    if rank_info.rank == 0:
        _wait_for_others(own, rank_info, timeout, stderr)
        own.set(_COMPLETE, "")
    else:
        own.wait([_COMPLETE], timeout)
    return PrefixStore("default_pg", own)


def _key(rank: int) -> str:
    return f"{_COUNT}/{rank}"


def _wait_for_others(store: TCPStore, rank_info: RankInfo, timeout: timedelta, stderr: int) -> None:
    begin, announced = time.monotonic(), False
    while store.add(_COUNT, 0) < rank_info.size:
        waited = time.monotonic() - begin
        if waited > timeout.total_seconds():
            raise _incomplete(rank_info, timeout, f"{_absent(store, rank_info.size)} did not come; look at the logs there")
        if waited > _LATE_S and not announced:
            _say(stderr, rank_info, f"waiting for {_absent(store, rank_info.size)}, {waited:.0f} s so far")
            announced = True
        time.sleep(_POLL_S)


def _absent(store: TCPStore, size: int) -> str:
    return _named([rank for rank in range(size) if not store.check([_key(rank)])])


def _named(ranks: Sequence[int]) -> str:
    """These ranks in words; of many, the first ones and how many more there are."""
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_LISTED]))}{more}"


@contextmanager
def _own_stderr() -> Iterator[int]:
    """A descriptor that stays stderr while file descriptor 2 is redirected."""
    stderr = os.dup(2)
    try:
        yield stderr
    finally:
        os.close(stderr)


def _say(stderr: int, rank_info: RankInfo, text: str) -> None:
    with suppress(OSError):  # nobody may be listening
        os.write(stderr, f"worldsize: rank {rank_info.rank}: {text}\n".encode())


def _incomplete(rank_info: RankInfo, timeout: timedelta, why: str) -> PeersUnreachable:
    assert rank_info.master is not None
    address, port = rank_info.master
    return PeersUnreachable(
        f"rank {rank_info.rank}: not all {rank_info.size} processes joined at {address}:{port} "
        f"within {timeout.total_seconds():g} s: {why}"
    )


def _in_use(error: Exception) -> bool:
    """Whether the port is taken; torch 2.6 raises a plain RuntimeError then."""
    return "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()


def _not_connected(rank_info: RankInfo, error: Exception, timeout: timedelta) -> UserError | PeersUnreachable:
    """The error for a group that was not formed."""
    import torch.distributed as dist

    assert rank_info.master is not None
    address, port = rank_info.master
    if not _in_use(error):
        if isinstance(error, dist.DistNetworkError):
            return PeersUnreachable(f"rank {rank_info.rank} cannot reach rank 0 at {address}:{port}: {first_line(error)}")
        return _incomplete(rank_info, timeout, first_line(error))
    in_use = f"port {port} on {address} is in use, perhaps by another job"
    if rank_info.launcher == "worldsize --procs":  # which chose a port that was free, and chooses another one next time
        return PeersUnreachable(in_use)
    return UserError(f"{in_use}: set MASTER_PORT to a free port")
