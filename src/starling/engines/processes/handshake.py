"""Handshake and closing barrier: learners compare themselves through the store before the first tensor travels.

gloo aborts the process on vectors of unequal sizes, and silently reinterprets unequal dtypes. So learners that differ
are refused here, by name and with both values. Processes of other runs, and strangers, are refused before anything
they say is parsed.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
from torch.distributed import DistError, DistStoreError
from torch.distributed.distributed_c10d import Store

from starling.engines.processes.run_token import sign, verified
from starling.engines.processes.stalls import Waits
from starling.errors import PeerLost, ProtocolError

LOOK_AROUND_SECONDS = 0.02
"""Longest time between two looks at the store."""
LONG_LOOK_AROUND_SECONDS = 0.2
"""The same in a long wait: a hundredth of its duration, up to this."""
LOOK_WHO_SECONDS = 0.5
"""Time between two looks at which learners are missing."""
LOOKS_PER_SECOND = 20
"""At most so many learners are looked for per second, however many there are."""

A_LOSS_WAS_NOTICED = "noticed"
"""The key that says so, whichever learner it was: a waiting learner asks one question, however many there are."""


def do_nothing() -> None:
    """A look around that sees nothing."""


@dataclass(frozen=True)
class Handshake:
    """What must be the same on all learners."""

    world: int
    strategy: str
    num_parameters: int
    dtype: str
    configuration: str
    """A digest of the resolved recipe."""
    starling: str = ""
    torch: str = ""

    @staticmethod
    def of_versions() -> dict[str, str]:
        """The versions of the code that must agree."""
        return {"starling": version("starling-asr"), "torch": str(torch.__version__)}


def await_keys(
    store: Store,
    keys: Sequence[str],
    timeout_seconds: float,
    look_around: Callable[[], None] = do_nothing,
    what: str = "a word of the others",
    writers: Sequence[int] = (),
    waits: Waits | None = None,
) -> None:
    """Wait until other learners have set all `keys`; `DistStoreError` after `timeout_seconds`.

    Now and then `look_around` is called, and may raise. The wait is noted in `waits` under the name `what`; `writers`
    are the ranks that set the keys, one for each.
    """
    if store.check(list(keys)):
        return
    begin = now = time.monotonic()
    pause = max(LOOK_WHO_SECONDS, len(writers) / LOOKS_PER_SECOND)
    asked = begin + LOOK_WHO_SECONDS
    with (waits or Waits()).waiting(what, writers) as wait:
        while not store.check(list(keys)):  # a wait of the store would end for nothing else, and log when it does
            look_around()
            if now - begin > timeout_seconds:
                raise DistStoreError(f"not all of {', '.join(keys)} were set for {timeout_seconds:g} s")
            longest = min(LONG_LOOK_AROUND_SECONDS, max(LOOK_AROUND_SECONDS, 0.01 * (now - begin)))
            time.sleep(min(longest, 0.1 * (now - begin) + 0.0005))
            now = time.monotonic()
            if writers and now > asked:
                absent = [rank for rank, key in zip(writers, keys, strict=True) if not store.check([key])]
                wait.whom, asked = tuple(absent), now + pause


def shake_hands(
    store: Store,
    rank: int,
    mine: Handshake,
    timeout_seconds: float,
    look_around: Callable[[], None] = do_nothing,
    waits: Waits | None = None,
) -> None:
    """Compare this learner with the others. `ProtocolError` names the first that differs, `PeerLost` the missing
    ones."""
    key = "greeting/{}".format
    store.set(key(rank), sign(rank, json.dumps(asdict(mine))))
    try:
        ranks = range(mine.world)
        keys = [key(other) for other in ranks]
        await_keys(store, keys, timeout_seconds, look_around, "the greeting of all", ranks, waits)
    except DistStoreError as error:
        missing = [other for other in range(mine.world) if not store.check([key(other)])]
        raise PeerLost(
            f"learner {rank} waited {timeout_seconds:g} s for a greeting from "
            f"{', '.join(f'learner {other}' for other in missing)}; see their logs, or give more timeout_seconds"
        ) from error
    for other in range(mine.world):
        _compare(rank, other, mine, json.loads(verified(rank, other, store.get(key(other)))))


def check_alike(store: Store, name: int, mine: Handshake) -> None:
    """Compare a joiner with learner 0 as it was when the run began, except for the number of learners: it learns that
    the others would refuse it before any of them waits for it. Raises ProtocolError."""
    theirs = json.loads(verified(name, 0, store.get("greeting/0")))
    _compare(name, 0, mine, theirs | {"world": mine.world})


def _compare(rank: int, other: int, mine: Handshake, theirs: dict[str, Any]) -> None:
    for name, value in asdict(mine).items():
        if theirs.get(name) != value:
            raise ProtocolError(
                f"learner {rank} and learner {other} differ in {name}: {value!r} and {theirs.get(name)!r}; "
                "start all learners from the same recipe and the same installation"
            )


def part(
    store: Store,
    rank: int,
    world: int,
    timeout_seconds: float,
    look_around: Callable[[], None] = do_nothing,
    waits: Waits | None = None,
) -> None:
    """The closing barrier: no learner hangs up while another still listens."""
    store.set(f"farewell/{rank}", "")
    try:
        keys = [f"farewell/{other}" for other in range(world)]
        await_keys(store, keys, timeout_seconds, look_around, "the farewell of all", range(world), waits)
    except DistError as error:
        if rank == 0:  # the others may find the store gone, when learner 0 keeps it
            lost = " and ".join(_absent(store, "farewell", range(world)))
            raise PeerLost(
                f"learner 0 lost {lost}: no farewell within {timeout_seconds:g} s of its own; "
                "the training itself was over"
            ) from error


def silent_learners(
    store: Store, rank: int, world: int, suspect: int | None = None, patience_seconds: float = 2.0
) -> str:
    """Name the lost learners: those that do not notice, within a moment, that a peer was lost.

    `suspect` is the peer whose connection broke, if there is one: it is the lost learner, unless it hung up because it
    noticed that another was lost. Learners that are waiting for others may notice much later; so if several are
    silent, they are given more time.
    """
    store.set(f"noticed/{rank}", "")
    store.set(A_LOSS_WAS_NOTICED, "")
    others = [other for other in range(world) if other != rank]
    asked = others if suspect is None else [suspect]
    for moments_left in (2, 1, 0):
        try:
            store.wait([f"noticed/{other}" for other in asked], timedelta(seconds=patience_seconds))
            break
        except DistError:
            silent = _absent(store, "noticed", asked)
            if len(silent) < 2 or moments_left == 0:
                return " and ".join(silent)
    return " and ".join(_absent(store, "noticed", others)) or "a connection to a peer"


def _absent(store: Store, word: str, learners: Iterable[int]) -> list[str]:
    """Name the learners that have not written `word`."""
    try:
        return [f"learner {other}" for other in learners if not store.check([f"{word}/{other}"])]
    except DistError:
        return ["the store that the learners meet in, and a peer"]
