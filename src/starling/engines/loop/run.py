"""The state of a loop's learner that outlives a membership, the plan with which the learners of a membership begin, and
the record of the order of a loop's events."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor

from starling.checkpoint.state import LearnerState, counted
from starling.configuration import Config
from starling.engines.loop.replica import Consensus, LoopReplica
from starling.errors import CheckpointError, ConfigError, ReplayError, some
from starling.events import Stream, read_stream
from starling.strategies import Strategy
from starling.training.job import Statistics
from starling.training.order import NO_BATCH, Script, arithmetic, sha256_of

Result = TypeVar("Result")
_LOG = logging.getLogger("starling")


@dataclass(frozen=True)
class Past:
    """A loop's progress before a membership."""

    has_state: bool
    num_done: int
    has_final: bool
    """Whether the learner has the final consensus."""
    has_joined: bool = False
    """Whether the learner joined after the run had begun."""
    counted: int = 0
    """Sum of the strategy's common counts."""
    newest_save: int = -1
    """Number of the newest checkpoint that the learner has saved, or from which it resumed; -1 if there is none."""


@dataclass(frozen=True)
class LoopPlan:
    """The plan with which the learners of a membership begin, by rank."""

    source: int | None
    """Rank whose state the `takers` copy, and whose strategy state and final consensus all learners copy. None if each
    learner continues with its own state."""
    takers: tuple[int, ...]
    num_done: tuple[int, ...]
    """Number of steps of the run after which each learner continues."""
    within: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """For each super-learner, the rank whose state its other learners, which follow, copy."""


class LoopRecord:
    """The order of a loop's events, which is recorded in one folder, read from a different folder, or both."""

    def __init__(self, learner: int, folder: Path | None, follow: Path | None) -> None:
        """Read the learner's record from `follow`. Raises `ConfigError` if there is none, and `ReplayError` if it is
        damaged."""
        self._learner, self._num_states, self._begun = learner, 0, False
        self._stream: Stream | None = None
        if folder is not None:
            if follow is not None and folder.resolve() == follow.resolve():
                raise ConfigError(f"record: {folder} is the record that is followed; choose another folder")
            folder.mkdir(parents=True, exist_ok=True)
            path = self._path(folder)
            path.unlink(missing_ok=True)
            self._stream = Stream(path)
        self.script: Script | None = None
        """This learner's part of the record that is followed; None if no record is followed."""
        if follow is not None:
            self.script = self._read(self._path(follow))

    def begin(self, plan: LoopPlan, number: int, members: Sequence[int], weights: Tensor) -> None:
        """Record the membership that begins. Raises `ReplayError` if the record that is followed contains a different
        membership, or was made on a system that computes different bits."""
        if (script := self.script) is not None:
            if self._begun or tuple(members) != tuple(script.members):
                raise ReplayError(
                    f"learner {self._learner}: the record has the learners {some(script.members)}, and here are "
                    f"{some(members)}; only a run that loses no learner, and that none joins, can be followed"
                )
            script.check_arithmetic(weights.device)
        self._begun = True
        here = arithmetic(weights.device)
        self.tell("membership", number=number, members=members, plan=asdict(plan), saves=False, **here)

    def tell(self, kind: str, **fields: Any) -> None:
        """Record an event."""
        if self._stream is not None:
            self._stream.append(kind, **fields)

    def state(self, step: int, weights: Tensor) -> None:
        """Record the hash of the weights `[P]` after a step. Raises `ReplayError` if the record that is followed has a
        different hash."""
        found = step, sha256_of(weights)
        self.tell("state", step=step, sha256=found[1])
        states, number = () if self.script is None else self.script.states, self._num_states
        self._num_states += 1
        if number < len(states) and states[number] != found:
            raise ReplayError(
                f"learner {self._learner}: after {step} steps, its weights have the hash {found[1][:12]}, but those of "
                f"the record have {states[number][1][:12]} after {states[number][0]}; the loop computes something else"
            )

    def close(self) -> None:
        """Close the file of the record."""
        if self._stream is not None:
            self._stream.close()

    def _path(self, folder: Path) -> Path:
        return folder / f"learner-{self._learner}.jsonl"

    def _read(self, path: Path) -> Script:
        script, num_memberships = Script(self._learner), 0
        if not path.is_file():
            raise ConfigError(f"follow: there is no {path}; give the folder that a joined loop had as `record`")
        for number, event in read_stream(path):
            script.add(event, f"{path}:{number}")
            num_memberships += event is not None and event["kind"] == "membership"
        if num_memberships != 1 or NO_BATCH not in script.turns:
            raise ReplayError(f"{path}: its loop lost learners, or did not end; such a record cannot be followed")
        return script


class Stateful(Protocol):
    """An object of a loop that has a state, such as a learning rate scheduler, a `GradScaler` or a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Adopt a state that `state_dict` has returned."""


_MANY = 4
"""Number of a learner's checkpoints that others have not saved, after which it warns; slow learners save later."""
_UNEQUAL = (
    "if learners make unequal numbers of steps, save(number) needs a number that all of them pass, such as the epoch"
)


class LoopCheckpoints:
    """A loop's checkpoints in one folder. They include the states of the loop's own objects, which are `stateful`."""

    def __init__(self, folder: Path, stateful: Sequence[Stateful]) -> None:
        """Load the newest checkpoint in `folder`, if there is one. Raises `CheckpointError` if it is damaged."""
        from starling.checkpoint.reader import checkpoints_in, load  # only loops that save need it

        self._folder, self._stateful, self._has_warned = folder, stateful, False
        self._newest = next((load(path) for path in reversed(checkpoints_in(folder))), None)

    def start(self, rank: int, world: int, strategy: str) -> LearnerState | None:
        """Return the state with which a learner resumes under `strategy`, or None if there is no checkpoint. The loop's
        own objects adopt their states."""
        from starling.checkpoint.files import incomplete, remove_partial

        saved = self._newest
        if rank == 0:
            if left := [name for name in incomplete(self._folder) if saved is None or name > saved.folder.name]:
                what = "%s: removed %s, which not all learners have saved; %s"
                _LOG.warning(what, self._folder, some(left), _UNEQUAL)
            remove_partial(self._folder)
        if saved is None:
            return None
        state, first = saved.start(rank, world, strategy), saved.learner(0)
        if not state.loop:
            raise CheckpointError(f"{saved.folder}: `starling train` saved it; a loop resumes what a loop has saved")
        if state.loop["kinds"] != self._kinds:
            raise ConfigError(
                f"stateful: {saved.folder} has the states of {some(state.loop['kinds']) or 'nothing'}, but the loop "
                f"gives {some(self._kinds) or 'nothing'}; give objects of the same classes in the same order"
            )
        for each, own, of_first in zip(self._stateful, state.loop["states"], first.loop["states"], strict=True):
            each.load_state_dict(of_first if getattr(each, "is_shared", False) else own)
        if rank == 0:
            why = saved.what_changed(world, strategy)
            begin = f"from the mean of all learners, because {why}" if why else "each learner from its own state"
            _LOG.warning("%s: resuming after learner 0's step %d, %s", saved.folder, first.loop["num_steps"], begin)
        return state

    def kept(self, num_steps: int) -> dict[str, Any]:
        """Return what a checkpoint keeps of the loop beside its learner."""
        states = [dict(each.state_dict()) for each in self._stateful]
        return {"num_steps": num_steps, "kinds": self._kinds, "states": states}

    def save(
        self, state: LearnerState, replica: LoopReplica, arrive: Callable[[str], int], has_one_model: bool
    ) -> None:
        """Write this learner's part of a checkpoint; see `CheckpointWriter`."""
        from starling.checkpoint.files import incomplete
        from starling.checkpoint.writer import CheckpointWriter

        CheckpointWriter(self._folder, arrive, replica.write_model, {}, has_one_model=has_one_model).save(state)
        self.check_left(state.rank, incomplete(self._folder, f"learner-{state.rank}.json"))

    def check_left(self, rank: int, left: Sequence[str]) -> None:
        """Warn, once, if other learners have not saved several checkpoints, which are `left`."""
        if len(left) >= _MANY and not self._has_warned:
            self._has_warned = True
            what = "learner %d: other learners have not saved %s, so nothing can resume from there yet; %s"
            _LOG.warning(what, rank, some(left), _UNEQUAL)

    @property
    def _kinds(self) -> list[str]:
        return [type(each).__name__ for each in self._stateful]


@dataclass(frozen=True)
class LoopFiles:
    """What a loop writes, and what it reads when it begins."""

    record: LoopRecord | None = None
    checkpoints: LoopCheckpoints | None = None


class LoopRun:
    """One loop's part in a run, across memberships: its model, its strategy and its progress."""

    def __init__(
        self,
        strategy: Strategy,
        options: Config,
        replica: LoopReplica,
        seed: int,
        most_not_finite: int,
        files: LoopFiles = LoopFiles(),
    ) -> None:
        self.record, self.checkpoints = files.record, files.checkpoints
        self.resumed: LearnerState | None = None
        """State from which the learner resumed; None if it did not resume, or once the run has begun."""
        self.newest_save = -1
        """Number of the newest checkpoint that any learner has begun to save."""
        self.strategy, self.options, self.replica, self.seed = strategy, options, replica, seed
        self.statistics = Statistics()
        self.has_state = False
        """Whether the loop has entered a membership. A joiner first copies the state of another learner."""
        self.has_joined = False
        """Whether the loop joined after the run had begun."""
        self.num_steps = 0
        """Number of steps of the run. A joiner begins with the number of the learner that it copies."""
        self.num_jumped = 0
        """Number of steps of the run that the loop skipped, because other learners had already made them when the
        membership changed."""
        self.gradient: Literal["none", "given", "alone", "used"] = "none"
        """State of the loop's gradient within `step`. given: the strategy has received it; alone: it is to be used
        without the other learners, which have already made this step; used: it has been used."""
        self.is_over = False
        """Whether the loop has made its last step."""
        self.final: Consensus | None = None
        self.consensus_bytes = 0
        self.most_not_finite = most_not_finite
        """Number of consecutive non-finite gradients that ends the run."""

    @property
    def steps_begun(self) -> int:
        """Number of steps of the run, including the one under way."""
        return self.num_steps + (self.gradient != "none")

    def with_steps(self, read: Callable[[], Result]) -> tuple[Result, float]:
        """Call `read`, which reads from the replica in another thread, and return its result and the number of steps
        that it contains. The number is NaN while a step is under way, because the result may or may not contain that
        step."""
        num_steps = self.num_steps
        found = read()
        is_between = self.steps_begun == num_steps == self.num_steps
        return found, num_steps if is_between else math.nan

    @property
    def past(self) -> Past:
        """The learner's progress, which the other learners need to know before the next membership."""
        num_done = self.num_steps + (self.gradient == "used")
        counts = counted(self.replica.strategy_state)
        return Past(self.has_state, num_done, self.final is not None, self.has_joined, counts, self.newest_save)

    def resume(self, rank: int, world: int) -> None:
        """Continue from the newest checkpoint, if there is one."""
        if self.checkpoints is None:
            return
        state = self.resumed = self.checkpoints.start(rank, world, self.strategy.described(self.options))
        if state is not None:
            self.replica.resume(state)
            self.has_state, self.num_steps = True, int(state.loop["num_steps"])
            self.newest_save = state.position.num_done

    def continue_from(self, num_done: int, is_taker: bool) -> None:
        """Continue after `num_done` steps of the run. If `is_taker`, the learner has copied a state that already
        includes its gradient."""
        if self.gradient == "given":
            behind = num_done > self.num_steps
            self.gradient = "given" if not behind else "used" if is_taker and self.has_state else "alone"
        before, self.num_steps = self.num_steps, num_done - (self.gradient in ("used", "alone"))
        self.num_jumped += self.num_steps - before if self.has_state else 0
        self.has_state = True


def plan(
    pasts: Sequence[Past], has_one_model: bool, is_in_step: bool, keeps_state: bool, size_of_unit: int = 1
) -> LoopPlan:
    """Return the plan of a membership. All learners compute the same plan.

    Joiners copy the state of the learner that has made the most steps. If all learners have the same model, learners
    that were interrupted one step earlier copy this state, too. Learners that step together continue after the same
    step. If one of the learners has the final consensus, all learners adopt it.

    With super-learners (`size_of_unit` above 1), the learners of each of them copy the state of the one that has made
    the most steps: a change that one of them has not applied yet may be gone with the membership.
    """
    finals = [rank for rank, past in enumerate(pasts) if past.has_final]
    with_state = [rank for rank, past in enumerate(pasts) if past.has_state]
    source = (
        finals[0]
        if finals
        else max(with_state, key=lambda rank: (pasts[rank].num_done, pasts[rank].counted, -rank), default=0)
    )
    newest = pasts[source].num_done
    takers = tuple(
        rank
        for rank, past in enumerate(pasts)
        if rank != source and (not past.has_state or (has_one_model and past.num_done < newest))
    )
    num_done = [newest if is_in_step or rank in takers else past.num_done for rank, past in enumerate(pasts)]
    within = []
    for first in range(0, len(pasts) if size_of_unit > 1 else 0, size_of_unit):
        unit = range(first, first + size_of_unit)
        own = max(unit, key=lambda rank: (pasts[rank].has_state, pasts[rank].num_done, pasts[rank].counted, -rank))
        num_done[first : unit.stop] = [num_done[own]] * size_of_unit
        if pasts[own].has_state:
            within.append((own, tuple(rank for rank in unit if rank != own)))
    return LoopPlan(source if takers or keeps_state or finals else None, takers, tuple(num_done), tuple(within))
