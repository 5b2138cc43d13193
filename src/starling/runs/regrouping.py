"""What an experiment's folder needs when its learners change: a record of its own for each view of them."""

from collections.abc import Callable

from torch.distributed import DistError

from starling.checkpoint.files import remove_partial
from starling.engines.processes.place import Place
from starling.errors import PeerLost
from starling.runs.experiment.folder import ExperimentFolder
from starling.runs.experiment.seen import Seen, begin_segment, segments
from starling.runs.observers import Message, Saver
from starling.training.membership import IgnoreMembership, Membership
from starling.workload import Position


class Regrouping:
    """Lets one learner's record, counts and checkpoints go on in each view: what an earlier one left undone, a
    checkpoint that not everybody wrote included, is dropped."""

    def __init__(self, folder: ExperimentFolder, place: Place, tell: Callable[[Message], None]) -> None:
        self._folder = folder
        self._place = place
        self._behind = place.store.clone()  # type: ignore[attr-defined]  # a store serves one question at a time
        self._tell = tell
        self._view = 0
        self._seen: Seen | None = None
        self._saver: Saver | None = None

    def watch(self, seen: Seen, saver: Saver) -> None:
        """These two are told of what changes."""
        self._seen, self._saver = seen, saver

    def count(self, name: str, number: int) -> int:
        """Add to what all learners count under a name in this view; the sum."""
        return int(self._place.store.add(self._key(name), number))

    def agree(self, name: str, own: str) -> str:
        """What the first learner to ask under a name in this view has answered, the same for all."""
        return self._place.store.compare_set(self._key(name), "", own).decode()

    def arrive(self, name: str) -> int:
        """Count the learners that have written their part of a checkpoint in this view; called by a thread."""
        try:
            return int(self._behind.add(self._key(f"checkpoint/{name}"), 1))
        except DistError as error:
            raise PeerLost(
                f"learner {self._place.rank} lost the store that the learners meet in, while saving {name}"
            ) from error

    def pause(self) -> None:
        self.end()
        if self._seen is not None:
            self._seen.close()

    def begin(self, view: Membership, position: Position, is_first: bool) -> None:
        if view.number == 0:
            return
        self._view = view.number
        if is_first:
            remove_partial(self._folder.checkpoints)
            remove_partial(self._folder.validation)
            begin_segment(self._folder.seen, position)
            self._tell({"say": _told(view, position)})
        if self._seen is not None:
            self._seen.go_on_in(segments(self._folder.seen)[-1])

    def end(self) -> None:
        if self._saver is not None:
            self._saver.close()

    def _key(self, name: str) -> str:
        return f"{Membership(self._view, ()).key}/{name}"


class InOneProcess(IgnoreMembership):
    """The same where all learners are in one process, which saves nothing before the end."""

    def __init__(self, folder: ExperimentFolder, seen: Seen, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._seen = seen
        self._say = say

    def pause(self) -> None:
        self._seen.close()

    def begin(self, view: Membership, position: Position, is_first: bool) -> None:
        self._seen.go_on_in(begin_segment(self._folder.seen, position))
        self._say(f"{view.reason}; {_told(view, position)}")


def _told(view: Membership, position: Position) -> str:
    learners = ", ".join(map(str, view.members))
    line = f"learners {learners} go on behind {position.num_done} mini-batches"
    if position.outstanding:
        line += f"; {len(position.outstanding)} that others had begun are given out again"
    return line
