"""Updates an experiment's folder when the membership changes: each membership has its own record of what was seen."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import DistError

from starling.checkpoint.files import remove_partial
from starling.engines.processes.forks import clone_store
from starling.engines.processes.place import Place
from starling.errors import PeerLost
from starling.experiment.folder import ExperimentFolder
from starling.experiment.observers import Recorder, Saver
from starling.experiment.record import begin_segment, segments
from starling.training.membership import Membership, MembershipObserver
from starling.workload import Position


class SharedCounts:
    """Counts that the learners of a membership share, in the run's store."""

    def __init__(self, place: Place) -> None:
        self._place = place
        # for the saving thread, because a store's connection serves one request at a time
        self._background_store = clone_store(place.store)
        self.membership = Membership(0, ())

    def count(self, name: str, number: int) -> int:
        """Add to a counter that all learners of this membership share, and return the sum."""
        return int(self._place.store.add(self._key(name), number))

    def agree(self, name: str, own: str) -> str:
        """Return the `own` of the first learner of this membership that calls this with `name`: the result is the same
        for all."""
        return self._place.store.compare_set(self._key(name), "", own).decode()

    def arrive(self, name: str) -> int:
        """Count this learner's part of a checkpoint, and return how many parts are written. Called by the saving
        thread."""
        try:
            return int(self._background_store.add(self._key(f"checkpoint/{name}"), 1))
        except DistError as error:
            raise PeerLost(
                f"learner {self._place.rank} lost its connection to the store while saving {name}"
            ) from error

    def _key(self, name: str) -> str:
        return f"{self.membership.key}/{name}"


@dataclass(eq=False)
class Regrouping(MembershipObserver):
    """Carries the record, counts and checkpoints of one learner, or of all learners of a simulation, from one
    membership to the next. Checkpoints that the previous membership has not completed are dropped.

    On one learner, `tell` is called with each new membership but the first, and a line about it.
    """

    folder: ExperimentFolder
    recorder: Recorder
    tell: Callable[[Membership, str], None]
    counts: SharedCounts | None = None
    saver: Saver | None = None

    def pause(self) -> None:
        self.end()
        self.recorder.close()

    def begin(self, membership: Membership, position: Position, is_first: bool) -> None:
        if membership.number == 0:
            return
        if self.counts is not None:
            self.counts.membership = membership
        if is_first:
            remove_partial(self.folder.checkpoints)
            remove_partial(self.folder.validation)
            begin_segment(self.folder.seen, position)
            line = f"learners {', '.join(map(str, membership.members))} continue after {position.num_done} mini-batches"
            if position.outstanding:
                line += f"; {len(position.outstanding)} outstanding tickets are re-issued"
            self.tell(membership, line)
        self.recorder.continue_in(segments(self.folder.seen)[-1])

    def end(self) -> None:
        if self.saver is not None:
            self.saver.close()
