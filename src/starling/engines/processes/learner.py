"""The real engine: each learner is a process, on `torch.distributed`.

On the CPU everything travels by gloo. On CUDA, with a device for each learner, collectives travel by NCCL; learners
that share a device fall back to gloo through host memory.
"""

import json
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _world

from starling.checkpoint.state import LearnerState
from starling.engines.processes import nccl, peers
from starling.engines.processes.checkpoint_barrier import CheckpointBarrier, Wishes
from starling.engines.processes.communication import ReducingModel
from starling.engines.processes.handshake import await_keys, do_nothing, silent_learners
from starling.engines.processes.peers import GradientHandle, PeerLearner, Place
from starling.engines.processes.regroup import DoneNotes
from starling.engines.processes.sockets import Connections
from starling.engines.processes.stalls import WAITS
from starling.errors import PeerLost, ProtocolError
from starling.learner import Handle
from starling.training.faults import Fault, Pause, kill_this_process, stop_this_process
from starling.training.flat import FlatModel
from starling.training.job import Job, Observer
from starling.training.learner import TrainingLearner
from starling.training.loading import Loaded, Loader, Lookahead
from starling.training.membership import Membership, MembershipChanged, MembershipFeed
from starling.training.replica import Replica
from starling.training.stragglers import Stragglers
from starling.training.succession import Past
from starling.workload import Ticket

__all__ = ["Place", "ProcessLearner", "choose_device", "has_own_device", "process_group"]

CAUSE_SECONDS = 5.0
"""How long a learner that lost a connection waits to hear whom it lost, from who watches them all."""
KEPT_CLAIMS = 1024
"""Claims of a team that stay in the store: its members are in step but for the mini-batches loaded ahead."""


class ProcessLearner(PeerLearner, TrainingLearner):
    """A learner of a job that is this process."""

    def __init__(
        self,
        job: Job,
        place: Place,
        flat: FlatModel,
        observer: Observer,
        start: LearnerState | None,
        timeout_seconds: float,
        loader: Loader,
        membership: MembershipFeed,
        view: Membership,
        wishes: Wishes | None = None,
        look_around: Callable[[], None] = do_nothing,
    ) -> None:
        replica = Replica(flat.weights, flat.gradients, flat.parameters, job.make_optimizer, job.clip_norm)
        if start is not None:
            flat.load_buffers(start.buffers)
        TrainingLearner.__init__(self, job, place.rank, place.world, replica, observer, start)
        device = flat.weights.device
        self.meet(place, device, has_own_device(place, device), timeout_seconds, look_around)
        self.view = view
        self._agreed = CheckpointBarrier(place.store, place.rank, place.world, wishes, self._mark_at, timeout_seconds)
        self._membership = membership
        # where learners have one model, how many mini-batches they have done says which
        is_noting = membership.is_watched and not job.strategy.has_one_model
        self._notes = DoneNotes(place.store, place.rank, self.sync_groups.num_workers) if is_noting else None
        self._flat = flat
        self._elsewhere: FlatModel | None = None  # the model at weights other than this learner's own
        self._reducing: dict[bool, ReducingModel] = {}  # by whether it is the model elsewhere
        self._drawn_ahead: set[int] = set()  # portions of this learner's team that it has not claimed yet
        self._newest_drawn = 0  # the newest of the portions that this learner has drawn
        self._num_draws = 0  # claims for which this learner has drawn, if its team is not everybody
        self._resumed_at: float | None = None  # when it got its last mini-batch
        is_counted = job.budget.steps is not None or job.budget.epochs is not None
        self._loader, self._lookahead = loader, Lookahead(is_counted)
        self._batches = loader.load(self._mine(), self._num_ahead)

    def claim(self) -> bool:
        self._release.check()
        return super().claim()

    def gradient(self, at: Tensor) -> Handle[Tensor]:
        version, ticket = self.replica.version, self._claimed()[0]
        self._gradient_version = version
        is_mine = at is self.weights
        if not is_mine:
            self._elsewhere = self._elsewhere or self._flat.twin()
            self._elsewhere.look_at(at)

        def result(reduced: bool) -> Tensor:
            if is_mine and self.replica.version != version:
                raise self.changed_beneath()
            if self._ticket is not ticket:
                raise ProtocolError(f"learner {self._rank} claimed again before it awaited its gradient")
            return self._gradient(self._flat if is_mine or self._elsewhere is None else self._elsewhere, reduced)

        # who is slow on purpose sleeps before the others have its gradient, which DDP would have sent by then
        return GradientHandle(self, result, may_reduce=self.job.stragglers == Stragglers())

    def step(self, gradient: Tensor, read_at: int | None = None) -> None:
        begin = self.now()
        super().step(gradient, read_at)
        self.spent.computing += self.now() - begin

    def drive(self) -> LearnerState:
        """Run the strategy to its end; the state in which it leaves this learner."""
        coroutine = self.job.strategy.start(self, self.job.options)
        try:
            while True:
                coroutine.send(None)  # it waits inside the handle's result
        except StopIteration:
            self._end_rounds()
            num_drawn, undone = self._drawn_by_all()
            with self._naming_the_lost("agreeing on a mark"):
                self._agreed.settle(self._release.check)
            return self.finish(self.tickets.handed_out(num_drawn), undone)
        finally:
            self._ordered.close()

    @contextmanager
    def agreeing(self) -> Generator[None, None, None]:
        """Let this learner and the others agree on marks while the context lasts."""
        self._agreed.start()
        try:
            yield
        finally:
            self._agreed.close()

    def past(self) -> Past:
        """What this learner brings to the next view."""
        return Past(self.view.number, self.num_done, self._minutes_before + self.now() / 60.0)

    def leave(self) -> None:
        super().leave()
        self._reducing.clear()  # what is left of them would listen to the gradients to come

    def _note_done(self, ticket: Ticket) -> None:
        if self._notes is not None:
            self._notes.add(ticket)

    def _mark_at(self, number: int, signal_number: int) -> None:
        """There is a mark before a portion that nobody has reached."""
        if signal_number:
            self.tickets.end_at(number)
        else:
            self.marks.add(number)

    def _reach(self, number: int) -> None:
        """Go on to a portion, once it is known whether there is a mark before it."""
        with self._naming_the_lost("agreeing on a mark"):
            self._agreed.reach(number, self._release.check)

    def _pass_marks(self, portion: int) -> None:
        if not self.is_worker:  # who computes has reached it when it was drawn
            self._reach(portion)
        super()._pass_marks(portion)

    def _look_for_change(self, error: Exception) -> None:
        self._release.check()
        if change := self._membership.beyond(self.view, CAUSE_SECONDS):
            raise MembershipChanged(change) from error

    def _suffer(self, fault: Fault) -> None:
        if isinstance(fault, Pause):
            stop_this_process(fault.seconds)
        else:
            kill_this_process()

    def _gradient(self, flat: FlatModel, reduced: bool) -> Tensor:
        begin = self.now()
        if not reduced or len(self.sync_group) == 1:
            loss = self.compute_gradient(flat.model, flat)
        else:
            self._count_mean(flat.gradients.nbytes)
            is_elsewhere = flat is not self._flat
            if is_elsewhere not in self._reducing:
                self._reducing[is_elsewhere] = self.reducing(flat.model)
            reducing = self._reducing[is_elsewhere]
            with self._naming_the_lost("the mean of a gradient"), reducing.reducing():
                try:
                    before_last = reducing.model.no_sync
                    loss = self.compute_gradient(reducing.model, flat, before_last, must_reach_all=True)
                    self._await_device()
                finally:
                    WAITS.end()  # it began behind forward
        if flat is not self._flat:
            flat.look_at(self.weights)  # the snapshot is not kept
        delay = self.delays.after(self.now() - begin)
        if delay > 0.0:
            time.sleep(delay)
        self.spent.computing += self.now() - begin
        self.report_step(loss)
        return flat.gradients

    def _whereabouts(self) -> str:
        return (
            f"round {self.num_claimed}" if len(self.sync_group) == self._world else f"after {self.num_claimed} claims"
        )

    def _mine(self) -> Iterator[Ticket]:
        """This learner's tickets, as they are drawn."""
        for number in self._draws() if self.is_worker else ():
            self._reach(number)
            if self.tickets.is_beyond(number):
                return
            self._drawn_ahead.add(number)
            self._newest_drawn = number
            yield replace(self.tickets.ticket(number, self.place_in_sync_group), part=self.part)

    def _draws(self) -> Iterator[int]:
        """The numbers of the portions of tickets that this learner's team gets, one after the other."""
        if len(self.sync_group) == self._world:
            yield from count()
        store, key = self.place.store, self._claim_key
        for claim in count():
            self._num_draws = claim + 1
            if len(self.sync_group) == 1:
                yield store.add("claims", 1) - 1
                continue
            if self.place_in_sync_group == 0:
                number = store.add("claims", 1) - 1
                store.set(key(claim), str(number))
                store.delete_key(key(claim - KEPT_CLAIMS))
            yield int(self._others_word(key(claim), "claiming"))

    def _claim_key(self, claim: int) -> str:
        """Where the first learner of a team of several notes which portion the team gets at a claim."""
        return f"claims/{self.sync_group.start}/{claim}"

    def _num_ahead(self) -> int:
        """How many portions this learner may draw ahead of the one that it is about to begin."""
        if len(self.sync_group) == self._world:
            return sys.maxsize  # nobody else would take them
        if self.place_in_sync_group == 0:
            return self._lookahead.num(self.now(), self._loader.load_seconds)
        # only what the first has drawn: to wait for more would keep the team from the step that the first is in
        following = [self._claim_key(self._num_draws), self._claim_key(self._num_draws + 1)]
        num_known = next((num for num in (2, 1) if self.place.store.check(following[:num])), 0)
        return len(self._drawn_ahead) - 1 + num_known

    def _drawn_by_all(self) -> tuple[int, list[int]]:
        """How many portions all teams together have drawn, and those that nobody will do, because they were drawn ahead
        when the time was up; waits until everybody has made its last claim."""
        if len(self.sync_group) == self._world:
            return self.num_claimed, []
        store = self.place.store
        undone = self._drawn_ahead if self.is_worker and self.place_in_sync_group == 0 else ()
        store.set(f"claimed/{self._rank}", json.dumps(sorted(undone)))
        keys = [f"claimed/{rank}" for rank in range(self._world)]
        with self._naming_the_lost("waiting for the last claims"):
            what, everybody = "the last claims of all", range(self._world)
            await_keys(store, keys, self._timeout_seconds, self._release.check, what, everybody)
        return int(store.add("claims", 0)), sorted(number for key in keys for number in json.loads(store.get(key)))

    def _next_batch(self) -> Loaded | None:
        begin = self.now()
        with WAITS.waiting("data"):
            loaded = next(self._batches, None)
        now = self.now()
        self.spent.waiting_for_data += now - begin
        if self._resumed_at is not None:
            spent = self.job.budget.fraction(self.tickets.progress(self._newest_drawn, minutes=0.0))
            self._lookahead.began(now, begin - self._resumed_at, spent)
        self._resumed_at = now
        if loaded is not None:
            self._drawn_ahead.discard(self.tickets.number_of(loaded[0]))
        return loaded

    def _agreed_seconds(self) -> float:
        """The clock of the team's first learner, through the store."""
        if len(self.sync_group) == 1:
            return self.now()
        key = f"clock/{self.sync_group.start}/{{}}".format
        if self.place_in_sync_group == 0:
            self.place.store.set(key(self.num_claimed), repr(self.now()))
            self.place.store.delete_key(key(self.num_claimed - 2))
        return float(self._others_word(key(self.num_claimed), "agreeing on the time"))

    def _others_word(self, key: str, what: str) -> str:
        """What another learner writes under a key."""
        with self._naming_the_lost(what):
            await_keys(
                self.place.store, [key], self._timeout_seconds, self._release.check, what, [self.sync_group.start]
            )
            return str(self.place.store.get(key).decode())

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._flat.model.named_buffers())

    def _consensus_distance(self) -> float | None:
        return None  # nobody here sees all weights; who completes a checkpoint does


def choose_device(name: str, place: Place) -> torch.device:
    """The device of a learner: `auto` is CUDA where there is one, a device each as far as they go."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())


def has_own_device(place: Place, device: torch.device) -> bool:
    """Whether no two learners of this machine share a CUDA device, which NCCL would refuse."""
    return device.type == "cuda" and place.local_world <= torch.cuda.device_count()


Telling = Callable[[Callable[[Membership], None]], AbstractContextManager[None]]
"""Inside of its context, what is given to it is called when there is a later view; see `Membership.telling`."""


@contextmanager
def process_group(
    place: Place,
    device: torch.device,
    timeout_seconds: float,
    telling: Telling = lambda on_change: nullcontext(),
    outlives_losses: bool = False,
) -> Generator[Connections, None, None]:
    """The default process group of `torch.distributed`, for as long as the context lasts; its connections, of which
    those that are made later belong to it as soon as they are noted. A later view ends the connecting at once; what
    waits for others inside of the context is the caller's to end. With `outlives_losses` it can: otherwise the watchdog
    of NCCL, where that is used, ends a process that lost a peer."""
    by_nccl = has_own_device(place, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if by_nccl and outlives_losses:
        nccl.outlive_lost_peers()
    connections = Connections()
    store = place.store.clone()  # type: ignore[attr-defined]  # a connection of its own, which can be cut while it waits
    try:
        with (
            telling(lambda change: connections.cut_all()),
            WAITS.waiting("connecting to the others", range(place.world), is_group=True),
        ):
            dist.init_process_group(
                f"cpu:gloo,cuda:{peers.DEVICE_BACKEND}" if by_nccl else "gloo",
                store=PrefixStore("group/0", store),
                rank=place.rank,
                world_size=place.world,
                timeout=timedelta(seconds=timeout_seconds),
            )
    except RuntimeError as error:
        _world.group_count = 0  # names of groups count on from those that failed, and must be the same on all learners
        lost = silent_learners(place.store, place.rank, place.world)
        raise PeerLost(
            f"learner {place.rank} lost {lost} while connecting to the others ({str(error).splitlines()[0]})"
        ) from error
    connections.note()
    try:
        yield connections
    finally:
        dist.destroy_process_group()
