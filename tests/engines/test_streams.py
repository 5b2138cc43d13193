"""In which order the streams of a device touch a learner's weights, and copy them to the host and back."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from starling.engines.processes.backend import Staging
from starling.engines.processes.learner import ProcessLearner
from starling.engines.processes.threads import Worker
from starling.training import replica
from starling.training import streams as engine_streams
from starling.training.order import FREE
from starling.training.replica import Replica
from starling.training.streams import OrderedLock, lock_for
from tests.engines.stand_in_streams import Clock, StandIn, Stream

SIZE = 6


class Witness:
    """Notes what each access to the weights is behind; an access that is not behind the one before it is a race."""

    def __init__(self, streams: StandIn) -> None:
        self._streams = streams
        self._lock = OrderedLock(streams)
        self._before: Clock = streams.compute.work()
        self.num_accesses = 0
        self.races: list[str] = []

    def __enter__(self) -> None:
        self._lock.__enter__()
        current = self._streams.current()
        if not current.is_behind(self._before):
            self.races.append(f"{current.name} touches the weights before access {self.num_accesses} is done")
        self._before = current.work()
        self.num_accesses += 1

    def __exit__(self, *error: None) -> None:
        self._lock.__exit__(*error)


@pytest.fixture
def streams() -> StandIn:
    return StandIn()


def staging_on(streams: StandIn | None = None) -> Staging:
    return Staging(torch.device("cpu"), Worker("starling-staging"), streams)


def replica_on(streams: StandIn, monkeypatch: pytest.MonkeyPatch) -> tuple[Replica, Witness]:
    witness = Witness(streams)
    monkeypatch.setattr(replica, "lock_for", lambda device: witness)
    weights, gradients = torch.zeros(SIZE), torch.zeros(SIZE)
    parameter = nn.Parameter(weights)
    parameter.grad = gradients
    return Replica(weights, gradients, [parameter], lambda given: torch.optim.SGD(given, lr=1.0), None), witness


def test_a_lock_on_the_cpu_is_a_plain_lock() -> None:
    """Where there are no streams, their order costs nothing."""
    assert type(lock_for(torch.device("cpu"))) is type(threading.Lock())


def test_what_one_stream_did_to_the_weights_is_there_for_the_next(
    streams: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever thread steps, averages, replaces or takes a snapshot: its stream is behind the access before."""
    mine, witness = replica_on(streams, monkeypatch)
    own, half = streams.new(), slice(0, SIZE // 2)
    kinds: list[Callable[[], object]] = [
        lambda: mine.step(torch.ones(SIZE), 1.0),
        lambda: mine.apply(torch.ones(SIZE)),
        lambda: mine.apply(torch.ones(SIZE // 2), half),
        lambda: mine.replace(torch.ones(SIZE)),
        lambda: mine.snapshot(half),
        mine.snapshot,
    ]
    for first in kinds:
        for second in kinds:
            first()
            with streams.using(own):
                second()
    assert witness.num_accesses == 2 * len(kinds) ** 2
    assert not witness.races


def test_streams_that_do_not_wait_are_seen_to_race(streams: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The witness of the test above finds a missing wait."""
    mine, witness = replica_on(streams, monkeypatch)
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: None)
    mine.step(torch.ones(SIZE), 1.0)
    with streams.using(streams.new()):
        mine.snapshot()
    assert len(witness.races) == 1


def test_the_background_does_not_wait_for_a_gradient_under_way(streams: StandIn) -> None:
    """It is behind the step that changed the weights, and not behind the backward pass given to the device since."""
    lock, own = OrderedLock(streams), streams.new()
    with lock:
        step = streams.compute.work()
    backward = streams.compute.work()
    with streams.using(own), lock:
        assert own.is_behind(step)
        assert not own.is_behind(backward)


def test_a_gradient_waits_for_the_last_applied_change_but_not_for_later_copies(streams: StandIn) -> None:
    """What the background begins after its change, such as the next piece, holds up nobody."""
    lock, own = OrderedLock(streams), streams.new()
    with streams.using(own):
        with lock:
            change = own.work()
        later = own.work()
        with streams.using(streams.compute), lock:
            assert streams.compute.is_behind(change)
            assert not streams.compute.is_behind(later)


def test_one_thread_alone_never_waits(streams: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on one stream happens in its order anyway."""
    mine, _ = replica_on(streams, monkeypatch)
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: pytest.fail("waited"))
    for _ in range(3):
        mine.step(torch.ones(SIZE), 1.0)
        mine.apply(mine.snapshot())


def test_a_message_is_sent_when_its_copy_is_there_and_in_the_order_of_the_calls(streams: StandIn) -> None:
    """The copy is behind what made the tensor, and the thread that sends waits for the copy."""
    staging, sent = staging_on(streams), []
    to_host = streams.made[0]
    begun = []
    for number in range(3):
        tensor = torch.full((4,), float(number))
        made = streams.compute.work()

        def send(host: Tensor, number: int = number) -> int:
            assert len(streams.waited_for) == number + 1
            assert streams.waited_for[-1].clock[to_host.name] == number + 1
            sent.append(host.tolist())
            return number

        begun.append(staging.hand_over(tensor, send))
        assert to_host.is_behind(made)
        assert (tensor.data_ptr(), to_host) in streams.kept
    assert [wait() for wait in begun] == [0, 1, 2]
    assert sent == [[float(number)] * 4 for number in range(3)]
    assert not streams.compute.is_behind(to_host.work())
    staging._sender.close()


def test_who_sends_waits_for_no_copy(streams: StandIn) -> None:
    """The next piece can begin while one is copied."""
    staging, may_end = staging_on(streams), threading.Event()
    begun = [staging.hand_over(torch.ones(4), lambda host: may_end.wait(30.0)) for _ in range(2)]
    may_end.set()  # reached although neither was sent
    assert all(wait() for wait in begun)
    staging._sender.close()


def test_what_was_received_is_on_the_device_before_the_stream_that_asked_uses_it(streams: StandIn) -> None:
    """The copy is on a stream of its own, and its memory is kept for the one that uses it."""
    staging, own = staging_on(streams), streams.new()
    to_device = streams.made[1]
    with streams.using(own):
        tensor = staging.to_device(torch.ones(4))
        assert own.is_behind(to_device.clock)
    assert not streams.compute.is_behind(to_device.clock)
    assert streams.kept == [(tensor.data_ptr(), own)]


def test_what_a_learner_sends_to_itself_is_complete_for_the_stream_that_takes_it(streams: StandIn) -> None:
    """A server beside its worker takes a gradient in another thread."""
    staging, own = staging_on(streams), streams.new()
    made = streams.compute.work()
    take = staging.pass_on(torch.ones(4))
    later = streams.compute.work()
    with streams.using(own):
        tensor = take()
        assert own.is_behind(made)
        assert not own.is_behind(later)
    assert streams.kept == [(tensor.data_ptr(), own)]


def test_on_the_cpu_nothing_is_copied_and_everything_is_done_at_once() -> None:
    """The tensor itself is what is sent, in the calling thread."""
    staging, tensor = staging_on(), torch.ones(4)
    where = []
    wait = staging.hand_over(tensor, lambda host: where.append((host.data_ptr(), threading.current_thread())))
    assert where == [(tensor.data_ptr(), threading.current_thread())]
    assert wait() is None
    assert staging.to_device(tensor) is tensor
    assert staging.pass_on(tensor)() is tensor


def test_a_background_has_its_own_stream_ordered_after_earlier_work(
    streams: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins behind the work of the thread that started it, such as the weights' first values."""
    monkeypatch.setattr(engine_streams, "streams_of", lambda device: streams)
    unconnected = ProcessLearner.__new__(ProcessLearner)
    unconnected._device, unconnected.rank, unconnected._background = torch.device("cpu"), 0, None
    unconnected.replica = SimpleNamespace(order=FREE)  # type: ignore[assignment]
    before, seen = streams.compute.work(), []

    async def activity() -> None:
        seen.append((streams.current().name, streams.current().is_behind(before)))

    monkeypatch.setattr(unconnected, "fail", lambda error: pytest.fail(str(error)))
    unconnected.start(activity())
    unconnected._background.join()
    assert seen == [(streams.made[0].name, True)]
    assert streams.current() is streams.compute
