"""Saving in the background: a learner copies its state and continues while a thread writes the copy."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from starling.checkpoint.reader import Checkpoint
from starling.checkpoint.state import LearnerState
from starling.checkpoint.writer import CheckpointWriter


class BackgroundWriter:
    """Runs `CheckpointWriter.save` in a thread.

    One thread runs at a time: checkpoints are completed in order, and there is at most one copy of the state. An error
    in the thread is raised unchanged by the next call of `check`, `save` or `close`. The process does not exit before
    the thread has. The writer's `arrive` must not use a connection on which the learner itself may wait.
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
        """Wait for the previous save, copy `state`, and start writing the copy.

        If this learner's part completes the checkpoint, the thread calls `completed` with it. `writer` replaces the
        usual writer for this save.
        """
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
        """Raise the error of the last save if it has failed; do not wait."""
        if self._under_way is not None and self._under_way[1].done():
            self.close()

    def close(self) -> None:
        """Wait for the last save, and raise its error if it failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way[0].join()
            under_way[1].result()
