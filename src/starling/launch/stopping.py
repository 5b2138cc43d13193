"""How a process takes a signal to stop, and when a learner asks for a checkpoint or a stop.

Starling's launcher receives a signal and tells its learners. Learners may receive it too: systemd and Slurm may signal
all processes, and torchrun forwards signals. A learner then tells the launcher, or without one the other learners.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

from starling.engines.processes.checkpoint_barrier import SaveRequests
from starling.launch.link import Link
from starling.launch.messages import CanStop, LauncherMessage, Signalled, Stop

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def save_requests_of(link: Link | None, minutes: float | None) -> Generator[SaveRequests, None, None]:
    """The checkpoints and stops that this learner process asks for inside the context: a checkpoint every `minutes`
    minutes, and a stop after a signal."""
    save_requests = SaveRequests(minutes, ignores_signals=True)

    def hear(message: LauncherMessage) -> None:
        if isinstance(message, Stop):
            save_requests.stop(message.signal_number)

    if link is not None:
        save_requests.on_ready = lambda: link.send(CanStop())
        link.listen(hear)

    def stop(number: int) -> None:
        if not save_requests.is_ready:  # there is nothing to save
            end_now(number)
        if link is None:
            save_requests.stop(number)
        else:
            with suppress(OSError):  # the launcher is gone: the link's thread ends this process
                link.send(Signalled(number))

    with on_stop_signal(stop):
        yield save_requests


def end_now(number: int) -> None:
    """End this process with the exit code that a shell reports for the signal."""
    os._exit(128 + number)


@contextmanager
def on_stop_signal(
    on_signal: Callable[[int], None], on_second: Callable[[int], None] = end_now
) -> Generator[None, None, None]:
    """Inside the context, call `on_signal` with the number of the first SIGINT or SIGTERM, and `on_second` with
    that of the next, which ends this process at once.

    A thread handles the signals, so that they take effect even while the main thread waits inside torch. Outside the
    main thread, the context does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def listen() -> None:
        num_heard = 0
        while received := ours.recv(64):
            for number in received:  # the numbers of all signals with a Python handler, not only of these two
                num_heard += number in STOP_SIGNALS
                if number in STOP_SIGNALS and num_heard == 1:
                    on_signal(number)
                elif number in STOP_SIGNALS:
                    on_second(number)

    thread = threading.Thread(target=listen, name="starling-signals", daemon=True)
    thread.start()
    before = {number: signal.signal(number, _handled_by_thread) for number in STOP_SIGNALS}
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        theirs.close()
        thread.join()
        ours.close()


def _handled_by_thread(number: int, frame: FrameType | None) -> None:
    """Replaces Python's handler, whose exception would be lost in callbacks from C code, such as soundfile's."""
