"""Memory shared by the processes of one machine. It has no file name, so nothing can be left behind."""

import json
import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from starling.engines.processes.handshake import await_keys, do_nothing
from starling.engines.processes.stalls import Waits
from starling.errors import ConfigError, PeerLost

_TOKEN_BYTES = 64
_KEY = "shared memory"


def share_memory(
    store: Store,
    rank: int,
    world: int,
    num_bytes: int,
    timeout_seconds: float,
    look_around: Callable[[], None] = do_nothing,
    waits: Waits | None = None,
) -> Tensor:
    """A uint8 tensor `[num_bytes]`, initially 0, in the same memory in all learners.

    Learner 0 creates the memory and the others open it through /proc; it exists as long as any learner holds it. A
    waiting learner calls `look_around` repeatedly, which may raise.

    Raises:
        ConfigError: The learners are not on one machine.
        PeerLost: A learner does not open the memory within `timeout_seconds`.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError("strategy: hogwild needs Linux: it shares memory between processes by memfd_create")
    if rank == 0:
        file = os.memfd_create("starling", os.MFD_CLOEXEC)
        try:
            memory = _make(store, file, num_bytes)
            # the others open it by the number of this file
            _wait_for_all(store, rank, world, timeout_seconds, look_around, waits)
        finally:
            os.close(file)
    else:
        memory = _open(store, rank, num_bytes, timeout_seconds, look_around, waits)
        _wait_for_all(store, rank, world, timeout_seconds, look_around, waits)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=_TOKEN_BYTES)


def _wait_for_all(
    store: Store, rank: int, world: int, timeout_seconds: float, look_around: Callable[[], None], waits: Waits | None
) -> None:
    """Wait until all learners have opened the memory."""
    store.set(f"{_KEY}/{rank}", "")
    try:
        keys = [f"{_KEY}/{other}" for other in range(world)]
        await_keys(store, keys, timeout_seconds, look_around, "opening the shared memory", range(world), waits)
    except DistError as error:
        absent = [str(other) for other in range(world) if not store.check([f"{_KEY}/{other}"])]
        raise PeerLost(
            f"learner {rank} waited {timeout_seconds:g} s for learner {' and '.join(absent)} to open the shared memory"
        ) from error


def _make(store: Store, file: int, num_bytes: int) -> mmap.mmap:
    os.ftruncate(file, _TOKEN_BYTES + num_bytes)
    memory = mmap.mmap(file, _TOKEN_BYTES + num_bytes)
    token = secrets.token_hex(_TOKEN_BYTES // 2)
    memory[:_TOKEN_BYTES] = token.encode()
    store.set(_KEY, json.dumps([os.getpid(), file, token]))
    return memory


def _open(
    store: Store,
    rank: int,
    num_bytes: int,
    timeout_seconds: float,
    look_around: Callable[[], None],
    waits: Waits | None,
) -> mmap.mmap:
    try:
        await_keys(store, [_KEY], timeout_seconds, look_around, "opening the shared memory", [0], waits)
    except DistError as error:
        raise PeerLost(f"learner {rank} waited {timeout_seconds:g} s for learner 0 to share its memory") from error
    pid, file, token = json.loads(store.get(_KEY))
    try:
        with Path(f"/proc/{pid}/fd/{file}").open("r+b") as opened:
            memory = mmap.mmap(opened.fileno(), _TOKEN_BYTES + num_bytes)
    except (OSError, ValueError) as error:
        look_around()
        raise _elsewhere(rank, str(error)) from error
    if memory[:_TOKEN_BYTES] != token.encode():
        raise _elsewhere(rank, "here its process number belongs to another process")
    return memory


def _elsewhere(rank: int, why: str) -> ConfigError:
    return ConfigError(
        f"strategy: hogwild: learner {rank} cannot share the memory of learner 0 ({why}); all learners must run on one "
        "machine, as one user: use parameter-server or adpsgd between machines"
    )
