"""What an experiment's folder needs when its learners change: a record of its own for each view of them."""

from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from starling.checkpoint.files import remove_partial
from starling.engines.membership import View
from starling.experiment.folder import ExperimentFolder
from starling.experiment.observers import Message
from starling.experiment.seen import Seen, begin_segment, segments
from starling.workload import Standing


class Regrouping:
    """Lets one learner's record, counts and checkpoints go on in each view: what an earlier one left undone, a
    checkpoint that not everybody wrote included, is dropped."""

    def __init__(self, folder: ExperimentFolder, store: Store, tell: Callable[[Message], None]) -> None:
        self.seen: Seen | None = None
        self._folder = folder
        self._store = store
        self._tell = tell
        self._view = 0

    def count(self, name: str, number: int) -> int:
        """Add to what all learners count under a name in this view; the sum."""
        return int(self._store.add(f"view/{self._view}/{name}", number))

    def pause(self) -> None:
        if self.seen is not None:
            self.seen.close()

    def begin(self, view: View, standing: Standing, is_first: bool) -> None:
        if view.number == 0:
            return
        self._view = view.number
        if is_first:
            remove_partial(self._folder.checkpoints)
            begin_segment(self._folder.seen, standing)
            self._tell({"say": _told(view, standing)})
        if self.seen is not None:
            self.seen.go_on_in(segments(self._folder.seen)[-1])


def _told(view: View, standing: Standing) -> str:
    learners = ", ".join(map(str, view.members))
    line = f"learners {learners} go on behind {standing.num_done} mini-batches"
    if standing.unfinished:
        line += f"; {len(standing.unfinished)} that others had begun are given out again"
    return line
