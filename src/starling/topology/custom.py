"""A pattern of one's own, checked before anybody trains with it; and patterns by name."""
# ruff: noqa: A002 - a round of averaging is called a round, here as on the learner

import importlib
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from starling.errors import ConfigError
from starling.topology.analysis import TOLERANCE, is_connected
from starling.topology.base import Topology
from starling.topology.patterns import PATTERNS

Function = Callable[[int, int, int], Mapping[int, float]]
"""`function(round, rank, world)`: whom `rank` mixes in `round`, each with its weight."""

_ROUNDS_KEPT = 512


@dataclass(frozen=True)
class _Plan:
    """One round, by rank."""

    sources: list[dict[int, float]]
    targets: list[list[int]]


class _Custom(Topology):
    def __init__(self, world: int, function: Function, rounds: int) -> None:
        super().__init__(world)
        self._function = function
        self._name = getattr(function, "__name__", repr(function))
        self._plans: dict[int, _Plan] = {}
        self._lock = threading.Lock()
        for k in range(rounds):
            if self._draw(k) != self._plan(k):
                raise ConfigError(
                    f"pattern {self._name}, round {k}: asked twice it gave two answers, so learners would disagree; "
                    "derive its chance from the round and a fixed seed alone"
                )
        if not is_connected(self, rounds):
            raise ConfigError(
                f"pattern {self._name}: not connected within {rounds} rounds, so some learners never hear of others; "
                "add edges, or let the check look at more rounds"
            )

    def sources(self, round: int, rank: int) -> Mapping[int, float]:
        self._check(round, rank)
        return self._plan(round).sources[rank]

    def targets(self, round: int, rank: int) -> Sequence[int]:
        self._check(round, rank)
        return self._plan(round).targets[rank]

    def _plan(self, round: int) -> _Plan:
        plan = self._plans.get(round)
        if plan is None:
            plan = self._draw(round)
            with self._lock:
                self._plans[round] = plan
                while len(self._plans) > _ROUNDS_KEPT:
                    del self._plans[next(iter(self._plans))]
        return plan

    def _draw(self, round: int) -> _Plan:
        """The answers of all for one round; every round is checked, also those after the first ones."""
        sources = [self._ask(round, rank) for rank in range(self.world)]
        given: defaultdict[int, float] = defaultdict(float)
        targets: list[list[int]] = [[] for _ in sources]
        for rank, taken in enumerate(sources):
            for peer, weight in taken.items():
                given[peer] += weight
                targets[peer].append(rank)
        for rank, taken in enumerate(sources):
            if abs(given[rank] - sum(taken.values())) > TOLERANCE:
                raise ConfigError(
                    f"pattern {self._name}, round {round}, learner {rank}: not doubly stochastic, so the mean of all "
                    f"would move: it takes {sum(taken.values()):.6g} of others, and others take {given[rank]:.6g} of "
                    "it; make the two equal"
                )
        return _Plan(sources, targets)

    def _ask(self, round: int, rank: int) -> dict[int, float]:
        where = f"pattern {self._name}, round {round}, learner {rank}"
        answer = self._function(round, rank, self.world)
        if not isinstance(answer, Mapping):
            raise ConfigError(f"{where}: it gave {answer!r}; give a mapping from peers to weights")
        taken: dict[int, float] = {}
        for peer, weight in answer.items():
            try:
                number, share = operator.index(peer), float(weight)
            except (TypeError, ValueError):
                raise ConfigError(f"{where}: {peer!r}: {weight!r} is not a rank and a weight") from None
            if not 0 <= number < self.world:
                raise ConfigError(f"{where}: mixes learner {number}; peers are 0 to {self.world - 1}")
            if number == rank:
                raise ConfigError(f"{where}: mixes itself; leave it out, its own weight is what the others leave of 1")
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{where}: mixes learner {number} with weight {share}; weights lie within 0 and 1")
            if share > 0.0:
                taken[number] = share
        if sum(taken.values()) > 1.0 + TOLERANCE:
            raise ConfigError(
                f"{where}: the weights of its peers sum to {sum(taken.values()):.6g}; its own is what they leave of 1, "
                "so make them at most 1"
            )
        return dict(sorted(taken.items()))


def custom(world: int, function: Function, rounds: int | None = None) -> Topology:
    """A pattern of one's own: `function(round, rank, world)` says whom `rank` mixes in `round`, with which weights.

    Its own weight is what the peers leave of 1; peers of weight 0 count as absent. The function must be a pure one:
    each learner asks it for all ranks. Every round is checked to be doubly stochastic when it is first needed, and the
    first `rounds` (default: 64, or 2 L where that is more) at once, where they must also connect all learners.

    Raises: ConfigError, naming the function, when it is not doubly stochastic, not connected or not a pure function.
    """
    return _Custom(world, function, max(64, 2 * world) if rounds is None else rounds)


def check_pattern(pattern: str) -> None:
    """ValueError unless `pattern` is a name in `PATTERNS`, or the `module:function` of a `custom` pattern."""
    if pattern not in PATTERNS:
        _load(pattern)


def find_topology(pattern: str, world: int, seed: int) -> Topology:
    """The topology of a name in `PATTERNS`, or of one's own `module:function`; else a ConfigError says why not."""
    if pattern in PATTERNS:
        return PATTERNS[pattern](world, seed)
    try:
        function = _load(pattern)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return custom(world, function)


def _load(pattern: str) -> Function:
    """Import `module:function`."""
    module, colon, name = pattern.partition(":")
    if not colon or not module or not name:
        near = get_close_matches(pattern, PATTERNS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"pattern {pattern!r} is unknown; {hint}known are {', '.join(PATTERNS)}, or module:function")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"pattern {pattern!r} cannot be imported: {error}; is it on PYTHONPATH?") from error
    if not callable(function):
        raise ValueError(f"pattern {pattern!r} is no function; give one of (round, rank, world)")
    return function  # type: ignore[no-any-return]
