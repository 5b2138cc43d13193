"""When learners save and stop: checkpoints by the clock, and a common end after a signal.

A launcher of ours receives the signals and tells its learners. Learners receive them, too, since systemd and Slurm may
signal all processes and torchrun passes signals on: they tell the launcher, or each other where there is none.
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

HEARD = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def save_requests_of(link: Link | None, minutes: float | None) -> Generator[SaveRequests, None, None]:
    """The checkpoints and stops that this learner process asks for, while the context lasts: a checkpoint after every
    so many `minutes`, and a stop after a signal."""
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
            with suppress(OSError):  # without its launcher this process ends anyway
                link.send(Signalled(number))

    with hearing(stop):
        yield save_requests


def end_now(number: int) -> None:
    """End this process with the exit code that a signal gives it in a shell."""
    os._exit(128 + number)


@contextmanager
def hearing(on_signal: Callable[[int], None]) -> Generator[None, None, None]:
    """Call `on_signal` with the number of the first SIGINT or SIGTERM while the context lasts; the second one ends this
    process at once.

    Both happen in a thread, so that the main thread may wait inside torch. Entered in another thread than the main one,
    the context does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def listen() -> None:
        num_heard = 0
        while received := ours.recv(64):
            for number in received:  # every signal that Python handles, SIGCHLD among them
                num_heard += number in HEARD
                if number in HEARD and num_heard == 1:
                    on_signal(number)
                elif number in HEARD:
                    end_now(number)

    thread = threading.Thread(target=listen, name="starling-signals", daemon=True)
    thread.start()
    before = {number: signal.signal(number, _leave_it_to_the_thread) for number in HEARD}
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


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Replaces Python's own handler: its exception would be lost where C code calls Python, as in soundfile."""
