"""A learner process across memberships. For each membership it creates a new `ProcessLearner`, which continues with the
state of the previous one.

When a membership ends, the first member of the next membership reads from the store which tickets are done. The tickets
that a lost learner had not done are re-issued. The first member then writes the plan for all members: the position of
the run, and which learners copy the state of which other learner.

If all learners have the same model, learners that were interrupted one step before the most advanced learner copy its
state. Under other strategies learners keep their own state, and a joiner copies the state of the first learner that has
one.
"""

import gc
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from starling.checkpoint.state import LearnerState
from starling.engines.processes.backend import LOSSES
from starling.engines.processes.checkpoint_barrier import SaveRequests
from starling.engines.processes.collectives import share_state
from starling.engines.processes.handshake import Handshake, Peers
from starling.engines.processes.island import IslandGroup, IslandModel, ShardedModel, check_island
from starling.engines.processes.learner import ProcessLearner
from starling.engines.processes.place import Place
from starling.engines.processes.process_group import process_group
from starling.engines.processes.stalls import Waits
from starling.engines.processes.threads import end_with_threads
from starling.engines.processes.tickets import noted
from starling.errors import PeerLost, ProtocolError, StarlingError
from starling.timeouts import REGROUP
from starling.training.flat import FlatModel, Model, trainable
from starling.training.gradient import measured_seconds
from starling.training.job import Job, Observer
from starling.training.loading import Loader
from starling.training.membership import Membership, MembershipFeed, MembershipObserver
from starling.training.order import Script
from starling.training.succession import (
    Life,
    MembershipStart,
    Past,
    are_apart,
    different_weights,
    must_begin_equal,
    next_membership,
    plan_after,
    sketch,
)
from starling.training.tensor_plan import tensor_plan
from starling.workload import Position, Ticket

PLAN = "plan"
"""Key of a membership's plan in the membership's store."""


def run_learner(
    job: Job,
    place: Place,
    device: torch.device,
    digest: str,
    observer: Observer,
    start: LearnerState | None = None,
    timeout_seconds: float = 600.0,
    membership: MembershipFeed | None = None,
    changes: MembershipObserver | None = None,
    save_requests: SaveRequests | None = None,
    waits: Waits | None = None,
    script: Script | None = None,
) -> LearnerState | None:
    """Run the learner at `place` from handshake to closing barrier.

    Returns the learner's final state, or None if a membership did not include it. `digest` identifies the whole
    configuration and must be the same on all learners. With `membership`, the survivors continue when a learner is
    lost, and `changes` observes membership changes. `save_requests` requests checkpoint barriers in addition to the
    job's; either all learners pass it, or none. This learner's waits are recorded in `waits`. With `script`, the part
    of a record that covers one membership, the learner follows the recorded order, and the run ends if a learner is
    lost.

    Raises:
        ProtocolError: Learners differ.
        PeerLost: A learner is lost, or does not respond within `timeout_seconds`, and the run cannot continue.
    """
    feed = membership or MembershipFeed(place.rank, Membership(0, tuple(range(place.world))))
    life = Life.begin(job, feed.name, feed.is_new, state=start, script=script)
    root, changes = Peers(place, timeout_seconds, waits or Waits(), feed), changes or MembershipObserver()
    with Loader(job.workload, job.num_workers, ignores_signals=save_requests is not None) as loader:
        check_island(job.island, device)
        return _Member(job, root, device, digest, observer, loader, changes, save_requests, life).run()


def warm_up(job: Job, flat: FlatModel | None) -> None:
    """Compute one gradient and optimizer step, so that slow first calls do not delay other learners. If the learner has
    no model of its own (`flat` is None), no gradient is computed."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    job.make_optimizer([parameter]).step()
    if flat is None:
        return
    for examples in job.workload.load(Ticket(0, 0, 0))[:1]:
        job.workload.loss(flat.model, examples.to(flat.weights.device)).backward()  # type: ignore[no-untyped-call]
    flat.gradients.zero_()


@dataclass
class _Member:
    job: Job
    root: Peers
    """Learners of the run. `enter` selects the learners of a membership."""
    device: torch.device
    digest: str
    observer: Observer
    loader: Loader
    changes: MembershipObserver
    save_requests: SaveRequests | None
    life: Life
    learner: ProcessLearner | None = None
    is_connected: bool = False
    """Whether this learner has connected to others, so that its threads may be waiting for them."""

    def __post_init__(self) -> None:
        self.feed = self.root.feed
        self._model: nn.Module | None = self.job.workload.make_model()  # the model for the next membership
        if self.job.island.tensor > 1:
            tensor_plan(self._model)  # an error is raised before the others wait for this learner
        whole = trainable(self._model)
        num_parameters, dtype = sum(each.numel() for each in whole), str(whole[0].dtype)
        self._handshake = Handshake(self.root.world, self.job.strategy.name, num_parameters, dtype, self.digest)
        self.flat = FlatModel(self._model, self.device) if self.job.island.size == 1 else None
        """The learner's own model, used in all memberships; None with islands, each of which cuts a new model."""

    def run(self) -> LearnerState | None:
        """Take part in one membership after another until the run ends."""
        try:
            if self.feed.is_new:
                self.root.check_alike(self._handshake)
                warm_up(self.job, self.flat)
            membership = self.feed.first()
            while self.feed.name in membership.members:
                try:
                    return self._be_in(membership)
                except LOSSES:
                    if self.life.script is not None or (change := self.feed.beyond(membership, REGROUP)) is None:
                        raise
                if self.learner is not None:
                    self.learner.leave()
                    self.learner = None
                    gc.collect()  # DDP reducers of this membership
                self.changes.pause()
                membership = next_membership(self.job, membership, change, is_ordered=True)
            return None
        except Exception as error:
            if self.is_connected:
                end_with_threads(error.exit_code if isinstance(error, StarlingError) else 1)
            raise

    def _be_in(self, membership: Membership) -> LearnerState:
        peers = self.root.enter(membership)
        if self.feed.is_watched:
            local_world = max(peers.place.local_world, peers.world)
            peers = replace(peers, place=replace(peers.place, local_world=local_world))
        self.feed.report("arrived", membership.number)
        peers.shake_hands(replace(self._handshake, world=peers.world))
        plan = self._plan(peers)
        self.is_connected = True
        with process_group(peers, self.device) as connections:
            flat = self._make_model(peers)
            self._begin_state(peers, plan, flat)
            life, shares, requests = self.life, plan.shares, self.save_requests
            learner = self.learner = ProcessLearner(
                self.job, peers, flat, life, shares, self.loader, self.observer, requests
            )
            learner.record_membership(membership, plan)
            self._check_weights(peers, learner)
            connections.note()
            self.feed.report("entered", membership.number)

            with peers.telling(learner.fail), learner.agreeing():
                state = learner.drive()
                self.changes.end()
                peers.part()
                return state

    def _plan(self, peers: Peers) -> MembershipStart:
        """Return the plan of a membership, after passing it to the observer of changes."""
        membership, state = peers.membership, self.life.state

        def begin(plan: MembershipStart) -> None:
            self.changes.begin(membership, plan.position, peers.rank == 0)

        if membership.number > 0:
            plan = agree_on_plan(self.root.store, peers, self.life.past, self.job, begin)
        else:
            position, minutes = (state.position, state.minutes) if state else (Position(), 0.0)
            plan = MembershipStart(peers.world, position, minutes)
            plan = plan.with_shares(self.job, membership.members, self._speeds(peers))
            if peers.rank == 0:
                peers.store.set(PLAN, plan.encode())
        if membership.number == 0 or peers.rank > 0:
            begin(plan)
        return plan

    def _speeds(self, peers: Peers) -> list[float] | None:
        """Measure the seconds that each learner needs for a mini-batch, if batch shares depend on this time. All
        learners measure simultaneously, because learners that share a machine also compute simultaneously."""
        job, flat = self.job, self.flat
        if job.batch_shares != "auto" or flat is None:
            return None
        job.validate(peers.world)
        seconds = measured_seconds(job.workload, flat.model, self.device) * job.stragglers.slow.get(self.feed.name, 1.0)
        return [float(each) for each in peers.gather_all("speed", seconds, "measuring the speed of each learner")]

    def _begin_state(self, peers: Peers, plan: MembershipStart, flat: Model) -> None:
        """Set the state with which this learner begins a membership."""
        life, rank, size = self.life, peers.rank, self.job.island.size
        if peers.membership.number == 0:
            if life.state is not None and isinstance(flat, IslandModel):
                life.state = flat.own_part(life.state, self.job.make_optimizer)  # a checkpoint may hold the whole model
            return
        state = life.state = plan.state(rank, life.state)
        if plan.source is None:
            return
        sources = range(plan.source, plan.source + size)
        shared = [share_state(state, source) for source in sources][rank % size]
        life.state = plan.with_source(rank, state, shared)

    def _make_model(self, peers: Peers) -> Model:
        """Return the model for a membership, which is this learner's own model or its part of its island's model."""
        if self.flat is not None:
            return self.flat
        island = IslandGroup(peers, self.job.island.size, self.life.statistics)
        model, self._model = self._model or self.job.workload.make_model(), None
        if self.job.island.tensor > 1:
            from starling.engines.processes.tensor import TensorModel

            return TensorModel(model, island)
        return ShardedModel(model, island)

    def _check_weights(self, peers: Peers, learner: ProcessLearner) -> None:
        """Raise `ProtocolError` if learners that must begin with the same weights have different weights. All learners
        come to the same result."""
        job, size = self.job, self.job.island.size
        if not must_begin_equal(job, self.life.state):
            return

        def compare(sketches: list[bytes]) -> str:
            found = [json.loads(each) for each in sketches]
            unlike = (other for other in range(size, peers.world) if are_apart(found[other % size], found[other]))
            return next((different_weights(job, other, other % size) for other in unlike), "")

        own, what = json.dumps(sketch(learner.weights)), "comparing the weights of all learners"
        if problem := peers.gather("weights", own, compare, what):
            raise ProtocolError(problem.decode())


def agree_on_plan(
    root: Store, peers: Peers, past: Past, job: Job, on_plan: Callable[[MembershipStart], None]
) -> MembershipStart:
    """Return the plan of a membership after the first. The first learner makes the plan, and calls `on_plan` before the
    plan is visible to the others."""

    def make(pasts: list[bytes]) -> str:
        members = [Past(**json.loads(text)) for text in pasts]
        trained = [each.membership for each in members if each.membership is not None]
        if not trained:
            return ""
        store = PrefixStore(Membership(max(trained), ()).key, root)
        before = MembershipStart.decode(store.get(PLAN))

        all_done = partial(noted, store, before.world, before.position)
        plan = plan_after(before, members, job, all_done, peers.membership.members)
        on_plan(plan)
        peers.store.set(PLAN, plan.encode())
        return plan.encode()

    plan = peers.gather("past", json.dumps(asdict(past)), make, "entering the next membership")
    if not plan:
        raise PeerLost("learners were lost before training began; start again")
    return MembershipStart.decode(plan)
