"""Saving behind training: a learner copies its state and continues while a thread writes the copy."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from starling.checkpoint.reader import Checkpoint
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import CheckpointWriter


class BackgroundWriter:
    """Does what a `CheckpointWriter` does in threads of its own, one at a time, so that checkpoints are completed in
    their order and there is at most one copy of the state.

    What fails there is raised here as it was, by the next call: `check`, `save` or `close`. The process does not end
    before a thread has. The writer's `arrive` must not need a connection that the learner waits on.
    """

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._under_way: tuple[threading.Thread, Future[None]] | None = None

    def save(
        self,
        state: LearnerState,
        completed: Callable[[Checkpoint], None],
        writer: CheckpointWriter | None = None,
    ) -> None:
        """Write a copy of `state` once the save before is done, which is waited for; `completed` is told the checkpoint
        by the thread, if this learner's part was the last. `writer` is used in place of the usual one."""
        self.close()
        chosen = writer or self._writer
        copy, outcome = [state.copy()], Future[None]()

        def write() -> None:
            try:
                checkpoint = chosen.save(copy.pop())
                if checkpoint is not None:
                    completed(checkpoint)
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

        thread = threading.Thread(target=write, name="starling-checkpoint", daemon=False)
        thread.start()
        self._under_way = thread, outcome

    def check(self) -> None:
        """Raise what has failed, without waiting."""
        if self._under_way is not None and self._under_way[1].done():
            self.close()

    def close(self) -> None:
        """Wait until all that was begun is written."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way[0].join()
            under_way[1].result()
