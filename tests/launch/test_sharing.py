"""Samplers whose samples go to whichever learner asks first."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

import starling
from starling.engines.processes.place import Place
from starling.errors import ConfigError
from starling.launch.sharing import Claims
from starling.training.membership import Membership


def flat(lists: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


class Learners:
    """Makes samplers of several learners in one process, which share a store as their processes do."""

    def __init__(self) -> None:
        self.store = dist.HashStore()

    def make(self, rank: int, make: Any) -> Any:
        made = make()
        made._number, place = 0, Place(rank, 1, rank, 1, self.store)
        made._find_place = lambda: place
        return made


@pytest.fixture
def learners() -> Learners:
    return Learners()


def take_turns(passes: list[Iterator[Any]], chance: random.Random) -> list[list[Any]]:
    """What each gets, if one is five times as fast as the others."""
    got: list[list[Any]] = [[] for _ in passes]
    running = list(range(len(passes)))
    while running:
        rank = chance.choices(running, [5.0 if each == 0 else 1.0 for each in running])[0]
        try:
            got[rank].append(next(passes[rank]))
        except StopIteration:
            running.remove(rank)
    return got


@pytest.mark.parametrize("seed", range(5))
def test_each_sample_of_an_epoch_is_given_once_at_unequal_speeds(learners: Learners, seed: int) -> None:
    """In two epochs, whose orders differ; the fast learner gets more."""
    samplers = [learners.make(rank, lambda: starling.SharedSampler(200, seed=seed, claim_size=3)) for rank in range(3)]
    epochs = []
    for _ in range(2):
        got = take_turns([iter(each) for each in samplers], random.Random(seed))
        assert sorted(flat(got)) == list(range(200))
        assert len(got[0]) > 2 * len(got[1])
        epochs.append(got[0][:3])
    assert epochs[0] != epochs[1]


def test_progress_is_that_of_all_learners_at_any_speeds(learners: Learners) -> None:
    """The slow one's too: in epochs, as of its newest claim, whatever it got itself."""
    fast, slow = (learners.make(rank, lambda: starling.SharedSampler(40, claim_size=4)) for rank in range(2))
    for epoch in range(2):
        parts = [iter(fast), iter(slow)]
        next(parts[1])
        assert slow.progress == epoch
        for _ in range(24):
            next(parts[0])
        assert fast.progress == epoch + 24 / 40
        for _ in range(4):
            next(parts[1])
        assert slow.progress == epoch + 28 / 40
        assert len(list(parts[0])) + len(list(parts[1])) == 40 - 29
        assert epoch + 0.6 < slow.progress < epoch + 1


def test_threads_that_ask_at_the_same_time_get_each_sample_once(learners: Learners) -> None:
    """A claim is a counter of the store, which gives each number once."""
    samplers = [learners.make(rank, lambda: starling.SharedSampler(600, claim_size=1)) for rank in range(4)]
    got: list[list[int]] = [[] for _ in samplers]

    def learn(rank: int) -> None:
        for index in samplers[rank]:
            got[rank].append(index)
            time.sleep(0.0)

    threads = [threading.Thread(target=learn, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(flat(got)) == list(range(600))


@pytest.mark.parametrize("seed", range(5))
def test_a_resumed_epoch_gives_what_no_learner_was_done_with(learners: Learners, seed: int) -> None:
    """Saved in the middle of claims; the state is the same whichever learner saves it, and fits another number of
    learners."""
    samplers = [learners.make(rank, lambda: starling.SharedSampler(50, seed=seed, claim_size=4)) for rank in range(2)]
    passes = [iter(each) for each in samplers]
    had: list[list[int]] = [[], []]
    trained: list[int] = []
    for rank, number, done in ((0, 11, 10), (1, 6, 5), (0, 3, 2)):
        had[rank] += islice(passes[rank], number)
        samplers[rank].done(done)
        trained += had[rank][:done]
        del had[rank][:done]
    first, second = (each.state_dict() for each in samplers)
    assert first == second
    learners.store = dist.HashStore()
    resumed = [learners.make(rank, lambda: starling.SharedSampler(50, seed=seed, claim_size=4)) for rank in range(3)]
    for each in resumed:
        each.load_state_dict(first)
    got = flat(take_turns([iter(each) for each in resumed], random.Random(seed)))
    assert sorted(got + trained) == list(range(50))
    assert sorted(flat(take_turns([iter(each) for each in resumed], random.Random(0)))) == list(range(50))


def test_between_epochs_the_state_is_the_next_one(learners: Learners) -> None:
    """Once all that was given is done; before, the last samples of the old one are still to come."""
    sampler = learners.make(0, lambda: starling.SharedSampler(10, claim_size=4))
    assert len(list(sampler)) == 10
    sampler.done(7)
    assert sampler.state_dict() == {"epoch": 0, "remaining": [[7, 8], [8, 10]], "samples": 10, "seed": 0}
    sampler.done(3)
    assert sampler.state_dict() == {"epoch": 1, "remaining": [[0, 10]], "samples": 10, "seed": 0}
    sampler.set_epoch(0)
    assert sampler.state_dict()["epoch"] == 0
    assert sorted(sampler) == list(range(10))
    learners.store = dist.HashStore()
    batches = learners.make(0, lambda: starling.SharedBatches(Batches(3)))
    assert [*batches] == [(0, 0), (0, 1), (0, 2)]
    assert batches.state_dict() == {"epoch": 1, "remaining": [[0, None]]}
    assert [*batches] == [(1, 0), (1, 1), (1, 2)]


def test_a_learner_that_has_ended_its_epoch_saves_the_next_one_although_another_is_still_at_work(
    learners: Learners,
) -> None:
    """A save after the epoch, under a strategy whose learners do not wait for each other: a run that resumes there may
    not train once more on the last samples of the other learner, as a whole epoch."""
    first, other = (learners.make(rank, lambda: starling.SharedSampler(10, claim_size=4)) for rank in range(2))
    at_work = iter(other)
    taken = [next(at_work)]
    other.done(1)
    own = list(first)
    first.done(len(own))
    taken += at_work
    assert sorted(own + taken) == list(range(10))
    assert first.state_dict() == {"epoch": 1, "remaining": [[0, 10]], "samples": 10, "seed": 0}
    assert other.state_dict()["epoch"] == 0
    other.done(len(taken) - 1)
    assert other.state_dict() == first.state_dict()


def test_what_a_lost_learner_had_is_given_to_the_others(learners: Learners) -> None:
    """Once, although two notice that it was lost; a learner that joins takes part."""
    samplers = [learners.make(rank, lambda: starling.SharedSampler(40, claim_size=4)) for rank in range(4)]
    membership = Membership(0, (0, 1, 2))
    for each in samplers:
        each._find_membership = lambda: membership
    lost, others = iter(samplers[2]), [iter(samplers[0]), iter(samplers[1])]
    trained = list(islice(lost, 6))[:5]
    samplers[2].done(5)
    got = [next(others[0]), next(others[1])]
    membership = Membership(2, (0, 1, 3))
    got += flat(take_turns([*others, iter(samplers[3])], random.Random(1)))
    assert sorted(got + trained) == list(range(40))


class Batches:
    """Batches of cuts, as a lhotse sampler gives them."""

    world_size = 1

    def __init__(self, num: int) -> None:
        self.num, self.epoch = num, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        yield from ((self.epoch, number) for number in range(self.num))


def test_batches_of_another_sampler_are_given_once(learners: Learners) -> None:
    """With a lost learner's, for which the sampler is iterated again; and a resumed epoch gives the rest."""
    samplers = [learners.make(rank, lambda: starling.SharedBatches(Batches(20))) for rank in range(3)]
    membership = Membership(0, (0, 1, 2))
    for each in samplers:
        each._find_membership = lambda: membership
    passes = [iter(each) for each in samplers]
    next(passes[2])
    samplers[2].done(0)
    got = [next(passes[0]), next(passes[0]), next(passes[1])]
    membership = Membership(1, (0, 1))
    got += flat(take_turns(passes[:2], random.Random(0)))
    assert sorted(got) == [(0, number) for number in range(20)]
    assert min(flat(take_turns([iter(each) for each in samplers[:2]], random.Random(0)))) == (1, 0)

    learners.store = dist.HashStore()
    single = learners.make(0, lambda: starling.SharedBatches(Batches(9)))
    assert len(list(islice(iter(single), 4))) == 4
    single.done(3)
    state, learners.store = single.state_dict(), dist.HashStore()
    again = learners.make(0, lambda: starling.SharedBatches(Batches(9)))
    again.load_state_dict(state)
    assert [number for _, number in again] == list(range(3, 9))


def test_a_lhotse_sampler_of_cuts_is_shared(learners: Learners) -> None:
    """Each cut once, by two learners."""
    from lhotse import CutSet, Recording
    from lhotse.dataset import DynamicBucketingSampler

    recordings = [Recording(f"r{n}", [], 16000, 16000 * (1 + n % 5), float(1 + n % 5)) for n in range(60)]
    cuts = CutSet.from_cuts(each.to_cut() for each in recordings)

    def make() -> Any:
        inner = DynamicBucketingSampler(cuts, max_duration=12, num_buckets=2, shuffle=True, rank=0, world_size=1)
        return starling.SharedBatches(inner)

    got = take_turns([iter(learners.make(rank, make)) for rank in range(2)], random.Random(0))
    assert sorted(cut.id for batch in flat(got) for cut in batch) == sorted(cut.id for cut in cuts)
    with pytest.raises(ConfigError, match="rank=0, world_size=1"):
        starling.SharedBatches(DynamicBucketingSampler(cuts, max_duration=12, num_buckets=2, rank=0, world_size=2))


def test_a_loader_takes_it_as_its_sampler() -> None:
    """With one learner, an epoch is one pass; loading processes do not ask."""
    sampler = starling.SharedSampler(10, shuffle=False)
    loader = DataLoader(list(range(10)), sampler=sampler, batch_size=4)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize(
    ("data", "options", "said"), [(0, {}, "is empty"), (3, {"claim_size": 0}, "claim_size: must be at least 1, got 0")]
)
def test_a_sampler_refuses_what_it_cannot_use(data: int, options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        starling.SharedSampler(data, **options)


def test_a_state_of_other_data_is_refused() -> None:
    """The error shows both values."""
    with pytest.raises(ConfigError, match="the saved state has samples 5, but this sampler has samples 6"):
        starling.SharedSampler(6).load_state_dict(starling.SharedSampler(5).state_dict())


def test_a_claim_that_is_about_to_be_recorded_is_waited_for() -> None:
    """So that a saved state cannot miss it."""
    store = dist.HashStore()
    claims = Claims(store, 0, 4)
    store.set("counted", "")
    assert store.add("given/0", 1) == store.add("begun", 1) == 1  # another learner, which has not recorded its claim
    store.set("learner/0", "1")
    assert store.add("learners", 1) == 1
    store.set("claim/0/0", "[0, 4, 0]")
    recorded = threading.Timer(0.01, lambda: [store.add("claims/0", 1), store.add("recorded", 1)])
    recorded.start()
    assert claims.unfinished(0, 0, [(0, 8, 0)]) == [(0, 4, 0), (4, 8, 0)]
    recorded.join()


class Run:
    """Learners that come, are killed and are restarted, over several epochs; each trains on one sample at a time."""

    def __init__(self, learners: Learners, world: int, epochs: int, make: Any) -> None:
        self.learners, self.epochs, self.make = learners, epochs, make
        self.membership = Membership(0, tuple(range(world)))
        self.trained = Counter[Any]()
        self.running: dict[int, Iterator[None]] = {rank: self._learner(rank) for rank in range(world)}

    def _learner(self, rank: int) -> Iterator[None]:
        sampler = self.learners.make(rank, self.make)
        sampler._find_membership = lambda: self.membership
        while sampler.epoch < self.epochs:
            for sample in sampler:
                yield  # it may be killed here, before it has trained on the sample
                self.trained[sample] += 1
                sampler.done(1)

    def change(self, members: Sequence[int]) -> None:
        self.membership = Membership(self.membership.number + 1, tuple(members))

    def kill(self, rank: int) -> None:
        del self.running[rank]
        self.change([each for each in self.membership.members if each != rank])

    def restart(self, rank: int) -> None:
        self.running[rank] = self._learner(rank)
        self.change([*self.membership.members, rank])

    def advance(self, rank: int) -> None:
        if next(self.running[rank], self) is self:
            del self.running[rank]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("make", "num"),
    [
        pytest.param(lambda: starling.SharedSampler(60, claim_size=4), 60, id="samples"),
        pytest.param(lambda: starling.SharedBatches(Batches(15)), 15, id="batches"),
    ],
)
def test_learners_that_are_killed_and_restarted_train_on_everything_once(
    learners: Learners, seed: int, make: Any, num: int
) -> None:
    """At any speeds, in several epochs, whichever epochs the others have reached; restarted processes begin with the
    first pass. Learner 0 is never lost and the slowest, so that somebody is left to take what is given again."""
    chance, epochs = random.Random(seed), 4
    run = Run(learners, 4, epochs, make)
    lost: list[int] = []
    while run.running:
        others = [rank for rank in run.running if rank]
        if others and 0 in run.running and chance.random() < 0.02:
            run.kill(victim := chance.choice(others))
            lost.append(victim)
        elif lost and others and chance.random() < 0.05:
            run.restart(lost.pop())
        else:
            run.advance(chance.choice([*others * 5, *(rank for rank in run.running if not rank)]))
    assert set(run.trained.values()) == ({epochs} if num == 60 else {1})
    assert run.trained.total() == epochs * num


def test_samples_that_are_lost_because_nobody_counts_are_a_warning(
    learners: Learners, caplog: pytest.LogCaptureFixture
) -> None:
    """Which says what to call."""
    first, other = (learners.make(rank, lambda: starling.SharedSampler(8, claim_size=4)) for rank in range(2))
    members = Membership(0, (0, 1))
    first._find_membership = lambda: members
    at_work = iter(first)
    next(at_work), next(iter(other))
    members = Membership(1, (0,))
    with caplog.at_level("WARNING", logger="starling"):
        assert len(list(at_work)) == 3
    assert (
        "learner 1 was lost, and the samples that it had received are left out of this epoch: call `done`"
        in caplog.text
    )


def test_a_resumed_sampler_says_where_it_is(learners: Learners) -> None:
    """The epoch for the loop, and the progress for the learning rate; also between two epochs."""
    sampler = learners.make(0, lambda: starling.SharedSampler(40, claim_size=4))
    assert (sampler.epoch, len(list(sampler)), sampler.epoch) == (0, 40, 1)
    part = list(islice(iter(sampler), 20))
    sampler.done(len(part))
    assert (sampler.epoch, sampler.progress) == (1, 1.4)
    resumed = starling.SharedSampler(40)
    resumed.load_state_dict(sampler.state_dict())
    assert (resumed.epoch, resumed.progress) == (1, 1.5)
    assert starling.SharedBatches(Batches(3)).epoch == 0


def test_a_restarted_process_that_has_loaded_another_epoch_takes_part_in_the_present_one(learners: Learners) -> None:
    """It loads the newest checkpoint, which the others, that have begun earlier, did not."""
    first, restarted = (
        learners.make(rank, lambda: starling.SharedSampler(12, seed=1, claim_size=4)) for rank in range(2)
    )
    for _ in range(5):
        list(first)
    present = iter(first)
    got = [next(present)]
    restarted.load_state_dict({"epoch": 4, "remaining": [[0, 12]], "samples": 12, "seed": 1})
    restarted._find_membership = lambda: Membership(0, (0, 1))
    assert restarted.epoch == first.epoch == 5  # before its first pass
    got += list(restarted)
    assert sorted([*got, *present]) == list(range(12)) and restarted.epoch == first.epoch == 6
