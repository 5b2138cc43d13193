"""What a learner process wants because somebody else does: marks by the clock, and an end where all have saved.

A launcher of ours hears the signals, and tells its learners over their lines. Learners hear them, too, for systemd and
Slurm may send them to all processes, and torchrun passes them on: they tell the launcher, or each other without one.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

from starling.engines.processes.checkpoint_barrier import Wishes
from starling.launch.link import Link

HEARD = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def wishes_of(link: Link | None, minutes: float | None) -> Generator[Wishes, None, None]:
    """What this learner process wants, with a mark after every so many `minutes`, while the context lasts."""
    wishes = Wishes(minutes, ignores_signals=True)
    if link is not None:
        wishes.on_ready = lambda: link.send({"can_stop": True})
        link.listen(lambda message: wishes.stop(message["stop"]) if "stop" in message else None)

    def stop(number: int) -> None:
        if not wishes.is_ready:  # there is nothing to save
            end_now(number)
        if link is None:
            wishes.stop(number)
        else:
            with suppress(OSError):  # a launcher that is gone ends this process by that
                link.send({"signalled": number})

    with hearing(stop):
        yield wishes


def end_now(number: int) -> None:
    """End this process as a signal of this number would."""
    os._exit(128 + number)


@contextmanager
def hearing(on_signal: Callable[[int], None]) -> Generator[None, None, None]:
    """Call `on_signal` with the number of the first SIGINT or SIGTERM, while the context lasts; the second one ends
    this process at once.

    Both happen in a thread, also while the main thread waits inside torch. Nothing is heard in another thread than the
    main one.
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
    """What Python itself does at a signal: an exception would be swallowed where C calls Python, as in soundfile."""
