"""Handshake and closing barrier of learners, through the store.

gloo aborts the process if vectors differ in size, and silently reinterprets vectors that differ in dtype. Therefore the
handshake rejects learners that differ before the first tensor is sent; the error names the learners and both values.
Messages from processes that do not belong to the run, and messages of an earlier run, are rejected before they are
parsed.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import torch
from torch.distributed import DistError, DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store

from starling.engines.processes.forks import clone_store
from starling.engines.processes.place import Place
from starling.engines.processes.run_token import new_challenge, sign, verified
from starling.engines.processes.stalls import Waits
from starling.errors import PeerLost, ProtocolError
from starling.timeouts import REGROUP
from starling.training.membership import Membership, MembershipChanged, MembershipFeed

LOOK_AROUND_SECONDS = 0.02
"""Maximum interval between two checks of the store."""
LONG_LOOK_AROUND_SECONDS = 0.2
"""Maximum interval between two checks in a long wait. The interval grows with the wait, to a hundredth of its duration,
up to this value."""
LOOKS_OF_ALL_PER_SECOND = 2000
"""Number of checks per second that all learners that wait for the same key make together. The store serves the checks
one by one."""
LOOK_WHO_SECONDS = 0.5
"""Minimum interval between two checks that determine which learners are missing."""
LOOKS_PER_SECOND = 20
"""Maximum number of learners that are checked per second."""
PATIENCE_SECONDS = 2.0
"""Time that a learner waits for others to report that they have noticed a loss."""

_CHALLENGE, _SIGNED = "handshake", "signed"
"""Words in the names of a learner's keys. Earlier versions wrote the whole handshake under the key that now holds the
challenge."""
A_LOSS_WAS_NOTICED = "noticed"
"""Key that is set as soon as any learner notices a loss, so that waiting learners need to check only one key."""
_OVER, _CHANGED = "over", "changed"


def do_nothing() -> None:
    """Do nothing; this is the default `look_around`."""


@dataclass(frozen=True)
class Handshake:
    """The values that must be the same on all learners."""

    world: int
    strategy: str
    num_parameters: int
    dtype: str
    configuration: str
    """Digest of the resolved recipe."""
    optimizer: str = ""
    """Classes and options of a joined loop's optimizers."""
    starling: str = field(default_factory=cache(partial(version, "starling-asr")))
    torch: str = field(default_factory=lambda: str(torch.__version__))


@dataclass(eq=False)
class Peers:
    """The learners of one membership, as one learner sees the others through the store.

    While the learner waits for others, it repeatedly calls `look_around`, which may raise. Its waits are recorded in
    `waits`. `naming_the_lost` converts an error of the store into an error that names the lost learners. The `feed`
    announces the next membership. Without a feed the first membership is the only one, and a lost learner is an error.
    """

    place: Place
    timeout_seconds: float = 600.0
    waits: Waits = field(default_factory=Waits)
    feed: MembershipFeed = None  # type: ignore[assignment]
    membership: Membership = None  # type: ignore[assignment]
    look_around: Callable[[], None] = do_nothing
    naming_the_lost: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()

    def __post_init__(self) -> None:
        self.store, self.rank, self.world = self.place.store, self.place.rank, self.place.world
        self.membership = self.membership or Membership(0, tuple(range(self.world)))
        self.feed = self.feed or MembershipFeed(self.rank, self.membership)

    def enter(self, membership: Membership) -> "Peers":
        """Return the learners of a membership that includes this learner. The announcement of the next membership ends
        the waits for them."""
        rank, world = membership.members.index(self.feed.name), len(membership.members)
        self.waits.among(rank, membership.members)
        place = replace(self.place, rank=rank, world=world, store=PrefixStore(membership.key, self.store))
        return replace(self, place=place, membership=membership, look_around=partial(self.feed.check, membership))

    def beside(self, is_closed: threading.Event, waits: Waits) -> "Peers":
        """Return the same learners over a separate connection to the store, because a connection serves one request at
        a time. They are for a thread whose waits have no time-out, and raise `CancelledError` once `is_closed` is
        set."""

        def look_around() -> None:
            if is_closed.is_set():
                raise CancelledError

        place = replace(self.place, store=clone_store(self.store))
        return replace(self, place=place, timeout_seconds=math.inf, waits=waits, look_around=look_around)

    def await_done(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait until `is_done` returns True; each call of `is_done` waits a moment. Raises `DistStoreError` with `what`
        after the time-out."""
        begin = time.monotonic()
        while not is_done():
            self.look_around()
            if time.monotonic() - begin > self.timeout_seconds:
                raise DistStoreError(f"Timed out: {what} for {self.timeout_seconds:g} s")

    def telling(self, on_end: Callable[[BaseException], None]) -> AbstractContextManager[None]:
        """A context in which `on_end` is called, by any thread, with the error that ends the membership early."""
        return self.feed.telling(self.membership, on_end)

    def await_keys(
        self,
        keys: Sequence[str],
        what: str = "waiting for the other learners",
        writers: Sequence[int] = (),
        written: Sequence[str] = (),
    ) -> None:
        """Wait until other learners have set all `keys`. Raises `DistStoreError` after the time-out.

        The wait is recorded as `what`. `writers` are the ranks for which this learner waits; each of them sets one of
        the `keys`. If the writers set the keys in `written` instead, one learner computes from these the value for
        which all learners wait. The more learners there are, the less often each of them checks for that value.
        """
        store, told = self.store, written or keys
        if store.check(list(keys)):
            return
        begin = now = time.monotonic()
        least = max(LOOK_AROUND_SECONDS, len(written) / LOOKS_OF_ALL_PER_SECOND)
        pause = max(LOOK_WHO_SECONDS, len(writers) / LOOKS_PER_SECOND)
        asked = begin + LOOK_WHO_SECONDS
        with self.waits.waiting(what, writers) as wait:
            while not store.check(list(keys)):  # `store.wait` cannot be interrupted, and logs when it times out
                self.look_around()
                if now - begin > self.timeout_seconds:
                    raise DistStoreError(f"not all of {', '.join(keys)} were set for {self.timeout_seconds:g} s")
                longest = max(least, min(LONG_LOOK_AROUND_SECONDS, 0.01 * (now - begin)))
                time.sleep(min(longest, 0.1 * (now - begin) + 0.0005))
                now = time.monotonic()
                if writers and now > asked:
                    absent = [rank for rank, key in zip(writers, told, strict=True) if not store.check([key])]
                    wait.whom, asked = tuple(absent), now + pause

    def gather(self, word: str, own: str, combine: Callable[[list[bytes]], str], what: str) -> bytes:
        """Return the result of learner 0's `combine` on the texts that all learners pass as `own`, in rank order.

        All learners must call this method. Each learner except learner 0 checks one key and reads one value, so that
        the work of the store grows linearly with the number of learners. Raises `DistStoreError` after the time-out.
        """
        ranks, result = range(self.world), f"{word}/all"
        keys = [f"{word}/{each}" for each in ranks]
        self.store.set(keys[self.rank], own)
        if self.rank == 0:
            self.await_keys(keys, what, ranks)
            self.store.set(result, combine(self.store.multi_get(keys)))
        else:
            self.await_keys([result], what, ranks, keys)
        return self.store.get(result)

    def gather_all(self, word: str, own: object, what: str) -> list[Any]:
        """Return the values that all learners pass as `own`, by rank. The values are sent as JSON."""
        found: list[Any] = json.loads(
            self.gather(word, json.dumps(own), lambda all_texts: f"[{b','.join(all_texts).decode()}]", what)
        )
        return found

    def shake_hands(self, mine: Handshake) -> None:
        """Compare this learner with the others. `ProtocolError` names the first learner that differs, and `PeerLost`
        names the missing learners.

        First all learners exchange challenges, which are not protected. The signature of each handshake covers all
        challenges, and a learner accepts another learner's handshake only if its own challenge is among these.
        """
        rank, own = self.rank, new_challenge()
        in_lines = self._exchange(_CHALLENGE, own, lambda said: b"\n".join(said).decode(errors="replace"))
        challenges = in_lines.decode(errors="replace")
        lines = challenges.split("\n")
        for other, each in enumerate(lines):
            if len(each) != len(own):
                raise ProtocolError(
                    f"learner {rank} does not understand learner {other}, which has another version of Starling or "
                    "does not belong to this run; start all learners from the same installation"
                )
        if own not in lines:
            raise ProtocolError(
                f"learner {rank} of {mine.world} does not find its challenge among the {len(lines)} in the store: they "
                "are of an earlier run, or learners differ in WORLD_SIZE; start all learners again, with another store"
            )
        signed = sign(rank, challenges, json.dumps(asdict(mine)))
        told = self._exchange(_SIGNED, signed, partial(_different, challenges))
        for other in json.loads(verified(rank, 0, challenges, told))["different"]:
            theirs = verified(rank, other, challenges, self.store.get(f"{_SIGNED}/{other}"))
            _compare(rank, other, mine, json.loads(theirs))

    def check_alike(self, mine: Handshake) -> None:
        """Compare a joiner with learner 0's handshake of the first membership, if that membership has begun. The number
        of learners is not compared. A joiner that differs thus fails before other learners wait for it. It is admitted
        only by the handshake of its own membership. Raises `ProtocolError`."""
        name, store, of_first = self.feed.name, PrefixStore(Membership(0, ()).key, self.store), f"{_SIGNED}/0"
        if store.check([of_first]):  # set once all learners of that membership have come
            challenges = store.get(f"{_CHALLENGE}/all").decode(errors="replace")
            theirs = json.loads(verified(name, 0, challenges, store.get(of_first)))
            _compare(name, 0, mine, theirs | {"world": mine.world})

    def _exchange(self, word: str, said: str, combine: Callable[[list[bytes]], str]) -> bytes:
        try:
            return self.gather(word, said, combine, "the handshake")
        except DistStoreError as error:
            missing = _absent(self.store, word, range(self.world)) or ["learner 0"]
            raise PeerLost(
                f"learner {self.rank} waited {self.timeout_seconds:g} s for the handshake of "
                f"{', '.join(missing)}; see their logs, or give more timeout_seconds"
            ) from error

    def part(self) -> None:
        """Pass the closing barrier, so that no learner disconnects while another learner still needs the connection.
        Raises `MembershipChanged` if some learners continue in the next membership; all learners then continue."""
        store, is_over = self.store, True
        store.set(f"closing/{self.rank}", "")  # raises if the store is gone already
        try:
            self.gather("closing", "", lambda all_here: "", "the closing barrier")
        except MembershipChanged:
            is_over = False
        except DistError as error:
            if self.rank == 0:  # other learners may find the store gone, if learner 0 hosts it
                lost = " and ".join(_absent(store, "closing", range(self.world)))
                raise PeerLost(
                    f"learner 0 lost {lost}, which did not reach the closing barrier within "
                    f"{self.timeout_seconds:g} s; training had already ended"
                ) from error
        self.end(is_over)

    def decide(self, is_over: bool) -> bool:
        """Return whether the run ends with this membership, or continues in the next. The answer is that of the first
        learner that decided."""
        outcome = _OVER if is_over else _CHANGED
        return bool(self.store.compare_set("outcome", "", outcome).decode() == _OVER)

    def end(self, is_over: bool = True) -> None:
        """State whether, for this learner, the run ends with this membership. Raises `MembershipChanged` if the run
        continues."""
        if self.feed.is_watched and not self.decide(is_over):
            raise MembershipChanged(self.feed.beyond(self.membership, REGROUP) or self.feed.latest)

    def silent(self, suspect: int | None = None) -> str:
        """Name the lost learners. A learner is lost if it does not report within `PATIENCE_SECONDS` that it has noticed
        the loss of a peer.

        `suspect` is the peer whose connection broke, if known. That peer is lost unless it disconnected because it had
        noticed another loss. Learners that are waiting for others may notice a loss much later, so if several are
        silent, they are given more time.
        """
        store = self.store
        try:
            store.set(f"noticed/{self.rank}", "")
            store.set(A_LOSS_WAS_NOTICED, "")
        except DistError:
            return "the store"  # with the process that hosted it, such as learner 0 under Slurm
        others = [other for other in range(self.world) if other != self.rank]
        asked = others if suspect is None else [suspect]
        for moments_left in (2, 1, 0):
            try:
                store.wait([f"noticed/{other}" for other in asked], timedelta(seconds=PATIENCE_SECONDS))
                break
            except DistError:
                silent = _absent(store, "noticed", asked)
                if len(silent) < 2 or moments_left == 0:
                    return " and ".join(silent)
        return " and ".join(_absent(store, "noticed", others)) or "a connection to a peer"


def _different(challenges: str, handshakes: list[bytes]) -> str:
    """Return, for each distinct handshake, the first learner that sent it. Learner 0 publishes these, and every learner
    compares itself with them, which is equivalent to a comparison with all learners. Handshakes that do not belong to
    this run are included."""
    first: dict[str, int] = {}
    for other, message in enumerate(handshakes):
        try:
            first.setdefault(verified(0, other, challenges, message), other)
        except ProtocolError:
            first.setdefault(f"not of this run: {other}", other)
    return sign(0, challenges, json.dumps({"different": list(first.values())}))


def _compare(rank: int, other: int, mine: Handshake, theirs: dict[str, Any]) -> None:
    for name, value in asdict(mine).items():
        if theirs.get(name) != value:
            raise ProtocolError(
                f"learner {rank} and learner {other} differ in {name}: {value!r} and {theirs.get(name)!r}; "
                "start all learners from the same recipe and the same installation"
            )


def _absent(store: Store, word: str, learners: Iterable[int]) -> list[str]:
    """Name the learners that have not set their key `word`."""
    try:
        return [f"learner {other}" for other in learners if not store.check([f"{word}/{other}"])]
    except DistError:
        return ["the store and a peer"]
