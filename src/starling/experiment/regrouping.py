"""Updates an experiment's folder when the membership changes: each membership has its own record of what was seen."""

from collections.abc import Callable, Sequence

from torch.distributed import DistError

from starling.checkpoint.files import remove_partial
from starling.engines.processes.forks import clone_store
from starling.engines.processes.place import Place
from starling.errors import PeerLost
from starling.experiment.folder import ExperimentFolder
from starling.experiment.observers import Saver
from starling.experiment.seen import Seen, begin_segment, segments
from starling.experiment.timeline import Timeline
from starling.launch.messages import LearnerMessage, Said
from starling.training.membership import IgnoreMembership, Membership
from starling.workload import Position


class Regrouping:
    """Carries one learner's record, counts and checkpoints from one membership to the next. Checkpoints that the
    previous membership has not completed are dropped."""

    def __init__(self, folder: ExperimentFolder, place: Place, tell: Callable[[LearnerMessage], None]) -> None:
        self._folder = folder
        self._place = place
        # for the saving thread, because a store's connection serves one request at a time
        self._background_store = clone_store(place.store)
        self._tell = tell
        self._generation = 0
        self._records: tuple[Seen | Timeline, ...] = ()
        self._saver: Saver | None = None

    def watch(self, records: Sequence[Seen | Timeline], saver: Saver) -> None:
        """Notify these of changes of the membership."""
        self._records, self._saver = tuple(records), saver

    def count(self, name: str, number: int) -> int:
        """Add to a counter that all learners of this membership share, and return the sum."""
        return int(self._place.store.add(self._key(name), number))

    def agree(self, name: str, own: str) -> str:
        """Return `own` of the first learner of this membership that calls this with `name`: the same for all."""
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

    def pause(self) -> None:
        self.end()
        for record in self._records:
            record.close()

    def begin(self, membership: Membership, position: Position, is_first: bool) -> None:
        if membership.number == 0:
            return
        self._generation = membership.number
        if is_first:
            remove_partial(self._folder.checkpoints)
            remove_partial(self._folder.validation)
            begin_segment(self._folder.seen, position)
            self._tell(Said(_told(membership, position)))
        for record in self._records:
            record.continue_in(segments(self._folder.seen)[-1])

    def end(self) -> None:
        if self._saver is not None:
            self._saver.close()

    def _key(self, name: str) -> str:
        return f"{Membership(self._generation, ()).key}/{name}"


class VirtualRegrouping(IgnoreMembership):
    """The counterpart of `Regrouping` for a simulation, which saves nothing before its end. `on_members` is called with
    the members of each new membership."""

    def __init__(
        self,
        folder: ExperimentFolder,
        records: Sequence[Seen | Timeline],
        say: Callable[[str], None],
        on_members: Callable[[tuple[int, ...]], None],
    ) -> None:
        self._folder = folder
        self._records = tuple(records)
        self._say = say
        self._on_members = on_members

    def pause(self) -> None:
        for record in self._records:
            record.close()

    def begin(self, membership: Membership, position: Position, is_first: bool) -> None:
        self._on_members(membership.members)
        segment = begin_segment(self._folder.seen, position)
        for record in self._records:
            record.continue_in(segment)
        self._say(f"{membership.reason}; {_told(membership, position)}")


def _told(membership: Membership, position: Position) -> str:
    learners = ", ".join(map(str, membership.members))
    line = f"learners {learners} continue after {position.num_done} mini-batches"
    if position.outstanding:
        line += f"; {len(position.outstanding)} outstanding tickets are re-issued"
    return line
