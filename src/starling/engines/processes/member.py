"""A learner process among others that come and go: in each view of them it is a learner anew, with the same weights."""

import gc
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from starling.checkpoint.state import LearnerState
from starling.engines.processes import regroup
from starling.engines.processes.checkpoint_barrier import Wishes
from starling.engines.processes.communication import ConnectionFailed
from starling.engines.processes.handshake import Handshake, check_alike, part, shake_hands
from starling.engines.processes.learner import ProcessLearner, process_group
from starling.engines.processes.peers import Place
from starling.engines.processes.regroup import LookAround
from starling.engines.processes.stalls import WAITS
from starling.engines.processes.transfer import share_state
from starling.engines.processes.worker import end_with_threads
from starling.errors import PeerLost, StarlingError
from starling.training.faults import FaultsOf
from starling.training.flat import FlatModel
from starling.training.job import Job, Named, Observer
from starling.training.learner import Tally
from starling.training.loading import Loader
from starling.training.membership import (
    IgnoreMembership,
    Membership,
    MembershipChanged,
    MembershipFeed,
    MembershipObserver,
)
from starling.training.stragglers import Delays
from starling.training.succession import Past, Plan, next_membership
from starling.workload import Position, Ticket

_OUTCOME, _OVER, _CHANGED = "outcome", "over", "changed"
REGROUP_SECONDS = 20.0
"""How long a learner that lost another waits to be told who is there now."""


def run_learner(
    job: Job,
    place: Place,
    device: torch.device,
    digest: str,
    observer: Observer,
    start: LearnerState | None = None,
    timeout_seconds: float = 600.0,
    membership: MembershipFeed | None = None,
    views: MembershipObserver | None = None,
    wishes: Wishes | None = None,
) -> LearnerState | None:
    """Be the learner at `place` from greeting to end, and return the state it ends in; None if it had to leave before.

    `digest` stands for the whole configuration and must be the same on all learners. Where somebody watches them
    (`membership`), the living go on when one is lost. `wishes` are the marks that it wants beside those of the job, and
    whether all are to end early; all learners have such wishes, or none. Raises `ProtocolError` when learners differ,
    `PeerLost` when one is gone or does not answer within `timeout_seconds`.
    """
    ignores_signals = wishes is not None and wishes.ignores_signals
    with Loader(job.workload, job.num_workers, ignores_signals) as loader:
        member = _Member(
            job,
            place,
            FlatModel(job.workload.make_model(), device),
            digest,
            Named(observer, place.rank),
            timeout_seconds,
            loader,
            membership or MembershipFeed(place.rank, Membership(0, tuple(range(place.world)))),
            views or IgnoreMembership(),
            wishes,
        )
        return member.run(start)


def warm_up(job: Job, flat: FlatModel) -> None:
    """Do once what takes long the first time, such as loading libraries, so that others need not wait for it."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    job.make_optimizer([parameter]).step()
    for examples in job.workload.load(Ticket(0, 0, 0))[:1]:
        job.workload.loss(flat.model, examples.to(flat.weights.device)).backward()  # type: ignore[no-untyped-call]
    flat.gradients.zero_()


@dataclass
class _Member:
    job: Job
    place: Place
    flat: FlatModel
    digest: str
    observer: Observer
    timeout_seconds: float
    loader: Loader
    membership: MembershipFeed
    views: MembershipObserver
    wishes: Wishes | None = None
    learner: ProcessLearner | None = None
    delays: Delays | None = None
    """How slow this learner is on purpose, from view to view."""
    faults: FaultsOf | None = None
    """What befalls it on purpose, from view to view."""
    tally: Tally | None = None
    """What it had counted of an epoch when a view was over."""
    has_met: bool = False
    """Whether threads may wait for others."""

    def run(self, start: LearnerState | None) -> LearnerState | None:
        """Go from view to view until all is done."""
        view, past = self._first_view(), Past()
        while True:
            try:
                return self._be_in(view, past, start)
            except Exception as error:
                change = self._what_changed(view, error)
            past, start = self._leave(past, start)
            try:
                view = next_membership(self.job, view, change, is_ordered=True)
            except PeerLost:
                end_with_threads(PeerLost.exit_code)
                raise
            if self.membership.name not in view.members:
                return None

    def _first_view(self) -> Membership:
        if self.membership.is_new:
            check_alike(PrefixStore(Membership(0, ()).key, self.place.store), self.membership.name, self._handshake(0))
            warm_up(self.job, self.flat)
        return self.membership.first_view()

    def _what_changed(self, view: Membership, error: Exception) -> Membership:
        """The view beyond this one; if there is none, `error` is raised."""
        if isinstance(error, MembershipChanged):
            return self.membership.latest
        is_loss = isinstance(error, PeerLost | ConnectionFailed | DistError)
        if is_loss and (change := self.membership.beyond(view, REGROUP_SECONDS)):
            return change
        if self.has_met:
            end_with_threads(error.exit_code if isinstance(error, StarlingError) else 1)
        raise error

    def _leave(self, past: Past, start: LearnerState | None) -> tuple[Past, LearnerState | None]:
        """Let go of the view that is over; what this learner has, and its own state."""
        if self.learner is not None:
            self.learner.leave()  # first: its background changes what it has
            past, start, self.tally = self.learner.past(), self.learner.state(Position()).copy(), self.learner.tally()
            self.learner = None
            gc.collect()  # of the reducers of gradients that were between this view's learners
        self.views.pause()
        return past, start

    def _be_in(self, view: Membership, past: Past, start: LearnerState | None) -> LearnerState:
        rank, world = view.members.index(self.membership.name), len(view.members)
        WAITS.among(rank, view.members)
        store = PrefixStore(view.key, self.place.store)
        local_world = max(self.place.local_world, world) if self.membership.is_watched else self.place.local_world
        place = replace(self.place, rank=rank, world=world, local_world=local_world, store=store)
        self.membership.arrive(view)
        is_first_view, seconds = view.number == 0, self.timeout_seconds

        def look_around() -> None:
            if self.membership.latest.number > view.number:
                raise MembershipChanged(self.membership.latest)

        shake_hands(store, rank, self._handshake(world), seconds, look_around)
        if is_first_view:
            position = start.position if start else Position()
            plan = Plan(world, position, start.minutes if start else 0.0)
            regroup.begin(store, rank, plan)
            self.views.begin(view, position, rank == 0)
        else:
            plan = self._agree(view, rank, past, seconds, look_around)
        self.has_met = True
        telling = partial(self.membership.telling, view)
        with process_group(
            place, self.flat.weights.device, seconds, telling, self.membership.is_watched
        ) as connections:
            try:
                with telling(lambda change: connections.cut_all()):  # groups of teams are made here, and wait too
                    if not is_first_view:
                        start = self._start(start, place, plan)
                    learner = self.learner = self._make_learner(place, start, view, look_around)
                connections.note()
                self.membership.enter(view)

                def end_view(change: Membership) -> None:  # called by another thread
                    learner.fail(MembershipChanged(change))
                    connections.cut()

                with self.membership.telling(view, end_view), learner.agreeing():
                    state = learner.drive()
                    self.views.end()
                    self._part(view, store, rank, look_around)
                    return state
            except BaseException:
                connections.cut()  # no thread is to wait for those who are still there
                raise

    def _part(self, view: Membership, store: Store, rank: int, look_around: LookAround) -> None:
        """Part from the others, unless some of them go on to the next view: then all do."""
        try:
            part(store, rank, len(view.members), self.timeout_seconds, look_around)
            wanted = _OVER
        except MembershipChanged:
            wanted = _CHANGED
        if self.membership.is_watched and store.compare_set(_OUTCOME, "", wanted).decode() == _CHANGED:
            raise MembershipChanged(self.membership.beyond(view, REGROUP_SECONDS) or self.membership.latest)

    def _make_learner(
        self, place: Place, start: LearnerState | None, view: Membership, look_around: LookAround
    ) -> ProcessLearner:
        learner = ProcessLearner(
            self.job,
            place,
            self.flat,
            self.observer,
            start,
            self.timeout_seconds,
            self.loader,
            self.membership,
            view,
            self.wishes,
            look_around,
        )
        name = self.membership.name
        learner.part = name % self.job.workload.num_parts
        learner.delays = self.delays = self.delays or Delays(self.job.stragglers, self.job.seed, name)
        if self.tally is not None:
            learner.count_on(self.tally)
        learner.faults = self.faults = self.faults or FaultsOf(() if self.membership.is_new else self.job.faults, name)
        return learner

    def _agree(self, view: Membership, rank: int, past: Past, seconds: float, look_around: LookAround) -> Plan:
        told: list[Plan] = []

        def tell(plan: Plan) -> None:
            self.views.begin(view, plan.position, True)
            told.append(plan)

        plan = regroup.agree(self.place.store, view, rank, past, self.job, seconds, look_around, tell)
        if not told:
            self.views.begin(view, plan.position, False)
        return plan

    def _start(self, own: LearnerState | None, place: Place, plan: Plan) -> LearnerState:
        """The state with which this learner begins a view."""
        rank, world = place.rank, place.world
        state = own or self._blank(place)
        state = replace(state, rank=rank, world=world, position=plan.position, minutes=plan.minutes, epochs_ended=None)
        if plan.source is None:
            return state
        shared = share_state(state, plan.source)
        return shared if rank in plan.takers else state

    def _blank(self, place: Place) -> LearnerState:
        """What a learner has that is new here: nothing of its own."""
        return LearnerState(place.rank, place.world, Position(), 0.0, self.flat.weights.detach().cpu(), {}, {})

    def _handshake(self, world: int) -> Handshake:
        return Handshake(
            world=world,
            strategy=self.job.strategy.name,
            num_parameters=self.flat.num_parameters,
            dtype=str(self.flat.weights.dtype),
            configuration=self.digest,
            **Handshake.of_versions(),
        )
