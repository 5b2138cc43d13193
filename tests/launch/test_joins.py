"""Learners that come back, or are new, join a run under way; whatever happens to them, the others continue."""

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from starling.launch.joiners import Changes, Joiners, ask, launcher_id, take_answer, taking_requests
from starling.launch.launcher import launch
from starling.launch.messages import JoinAnswer, JoinRequest, LearnerMessage, Reached, values_of
from starling.launch.process import LearnerProcess
from starling.launch.roster import Loss, Roster
from starling.strategies import find_strategy
from starling.strategies.islands import Island, between_islands
from starling.training.faults import Join, Kill, Pause
from starling.training.membership import Membership
from tests.launch.joining_process import NUM_MINI_BATCHES, OPTIONS
from tests.warm_start import own_learner, own_learners


class Run:
    """A run that learners join, and what was said in it."""

    def __init__(self, mode: str, world: int, folder: Path) -> None:
        self.mode, self.world, self.folder = mode, world, folder
        self.hurry = folder / "hurry"
        self.requests = folder / "joins"
        self.said: list[str] = []
        self.left_out: list[str] = []
        self.losses: list[Loss] = []
        self.joined: list[int] = []
        self.trained: list[int] = []
        """How many learners trained when each joined."""
        self.generations: dict[int, int] = {}
        self.num_steps: Counter[int] = Counter()
        self.steps_before: dict[int, int] = {}
        self.num_done: dict[int, int] = {}
        self.has_left: set[int] = set()
        self.asked: list[JoinRequest] = []
        self.victims: list[int] = []
        self.expected = 0

    def go(
        self,
        kill: int | None = None,
        ask_for: tuple[int, ...] = (),
        ask_after_loss: tuple[int, ...] = (),
        faults: tuple[Kill | Pause | Join, ...] = (),
        replaces: bool = False,
        expect: int = 1,
    ) -> None:
        """To its end, in a hurry once `expect` learners have joined and done their share; no process is left behind."""
        self.expected = expect
        self.victims = [] if kill is None else [kill]
        self.wanted, self.wanted_after_loss = ask_for, ask_after_loss
        name, _, island = self.mode.partition("/")[0].partition("+")
        strategy = between_islands(find_strategy(name), Island(**{island: 2} if island else {}))
        options = strategy.options(**OPTIONS.get(strategy.name, {}))
        with taking_requests(self.requests) as requests:
            changes = Changes(
                succession=lambda members, lost, joining: strategy.successors(options, members, lost, joining),
                on_loss="replace" if replaces else "continue",
                silence_seconds=60.0,
                faults=faults,
                requests=requests,
                say=self.said.append,
                on_lost=self.on_loss,
                on_join=self.on_join,
                on_left_out=lambda learner, reason: self.left_out.append(reason),
            )
            command = [sys.executable, "-m", "tests.launch.joining_process", self.mode, str(self.hurry)]
            losses = launch(command, self.world, self.folder, self.on_message, changes)
        assert losses == self.losses
        assert self.hurry.exists()
        assert not list(own_learners())

    def on_loss(self, loss: Loss) -> None:
        self.losses.append(loss)
        self.asked += [ask(self.requests, number) for number in self.wanted_after_loss]

    def on_join(self, learner: int, num_learners: int) -> None:
        self.joined.append(learner)
        self.trained.append(num_learners)
        self.steps_before[learner] = self.num_steps[learner]

    def on_message(self, learner: int, message: LearnerMessage) -> None:
        told: dict[str, Any] = dict(values_of(message))
        if isinstance(message, Reached) and message.stage == "entered":
            self.generations[learner] = message.generation
        self.num_steps[learner] += "step" in told
        if "num_done" in told:
            self.num_done[learner] = told["num_done"]
        if "left" in told:
            self.has_left.add(learner)
        if len(self.generations) >= self.world and "step" in told:
            for victim in self.victims:
                os.kill(own_learner(victim).pid, signal.SIGKILL)
            self.victims = []
            self.asked += [ask(self.requests, number) for number in self.wanted]
            self.wanted = ()
        if self.is_enough():
            self.hurry.touch()

    def is_enough(self) -> bool:
        """Whether all expected joiners have done a share of the work."""
        shares = [self.num_steps[learner] - before for learner, before in self.steps_before.items()]
        if "+tensor" in self.mode:  # one rank of the island reports for all
            shares = shares and [max(shares)]
        return len(self.joined) >= self.expected and all(share >= 3 for share in shares)

    def answer(self, number: int = 0) -> JoinAnswer:
        """What became of a request."""
        answer = take_answer(self.requests, self.asked[number])
        assert answer is not None
        return answer

    def assert_whole(self, learners: int) -> None:
        """The budget of all was finished together by so many."""
        assert len(self.num_done) == learners
        assert len(set(self.num_done.values())) == 1
        for num_done in self.num_done.values():
            assert NUM_MINI_BATCHES <= num_done < NUM_MINI_BATCHES + learners


@pytest.mark.wide
@pytest.mark.parametrize(
    ("strategy", "world", "victim"),
    [
        ("adpsgd", 3, 1),
        pytest.param("allreduce", 2, 0, marks=pytest.mark.soak),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                ("parameter-server", 3, 1),
                ("delay-by-one", 3, 1),
                ("dpsgd", 4, 3),
                ("delayed", 3, 1),
                ("hogwild", 3, 0),
            )
        ),
    ],
)
def test_a_learner_that_was_lost_is_started_again_and_joins(
    strategy: str, world: int, victim: int, tmp_path: Path
) -> None:
    """Under its name; it takes a neighbour's state, does its share, and all finish the budget. `make soak` has the
    other strategies."""
    run = Run(strategy, world, tmp_path)
    run.go(kill=victim, replaces=True)
    assert [loss.learner for loss in run.losses] == [victim]
    assert run.joined == [victim]
    assert set(run.generations.values()) == {2}
    run.assert_whole(world)
    assert run.trained == [world]


@pytest.mark.soak
def test_a_super_learner_comes_back_whole(tmp_path: Path) -> None:
    """It left whole, for one of its learners was killed; both are started again, and join when both are ready."""
    run = Run("hadpsgd", 4, tmp_path)
    run.go(kill=1, replaces=True, expect=2)
    assert sorted(run.joined) == [0, 1]
    assert run.has_left == {0}
    assert set(run.generations.values()) == {2}
    run.assert_whole(4)


@pytest.mark.soak
@pytest.mark.parametrize(
    "strategy", ["allreduce+sharded", "adpsgd+sharded", "allreduce+tensor", "adpsgd+tensor", "dpsgd+tensor"]
)
def test_an_island_comes_back_whole(strategy: str, tmp_path: Path) -> None:
    """Its rank 1 is killed, so it leaves; both ranks are started again, and take the shards of the other island."""
    run = Run(strategy, 4, tmp_path)
    run.go(kill=1, replaces=True, expect=2)
    assert sorted(run.joined) == [0, 1]
    assert run.has_left <= {0}
    assert set(run.generations.values()) == {2}
    run.assert_whole(4)


@pytest.mark.soak
def test_half_an_island_is_refused(tmp_path: Path) -> None:
    """One rank more is refused, two join."""
    run = Run("adpsgd+sharded", 2, tmp_path)
    run.go(ask_for=(1, 2), expect=2)
    assert "3 learners cannot be divided into islands of 2" in run.answer(0).refused
    assert run.answer(1).joined == (2, 3)


@pytest.mark.soak
def test_more_learners_join_on_request(tmp_path: Path) -> None:
    """Two requests at once: one for two learners, one for an impossible number."""
    run = Run("adpsgd", 2, tmp_path)
    run.go(ask_for=(2, 0), expect=2)
    assert sorted(run.joined) == [2, 3]
    assert run.answer(0) == JoinAnswer(joined=(2, 3), learners=4)
    assert "the number of learners must be in [1, 4" in run.answer(1).refused
    run.assert_whole(4)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["parameter-server", "allreduce", "hogwild", "delay-by-one", "dpsgd", "delayed"])
def test_more_learners_join_under_any_strategy(strategy: str, tmp_path: Path) -> None:
    """A server of its own stays the last one: joiners compute."""
    run = Run(strategy, 2, tmp_path)
    run.go(ask_for=(1, 1), expect=2)
    assert run.answer(0).joined
    assert run.answer(1).joined
    run.assert_whole(4)


@pytest.mark.soak
def test_a_request_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Super-learners are whole: three learners more are refused, two join."""
    run = Run("hadpsgd", 2, tmp_path)
    run.go(ask_for=(3, 2), expect=2)
    assert "5 learners cannot be divided into super-learners of 2" in run.answer(0).refused
    assert run.answer(1).joined == (2, 3)


@pytest.mark.soak
def test_a_name_that_was_lost_is_given_again_and_a_learner_joins_at_its_time(tmp_path: Path) -> None:
    """Learner 1 is killed, learner 5 comes on purpose while that is borne, and a request brings learner 1 back."""
    run = Run("delay-by-one", 3, tmp_path)
    run.go(kill=1, ask_after_loss=(1,), faults=(Join(join=5, at_seconds=0.0),), expect=2)
    assert sorted(run.joined) == [1, 5]
    assert run.answer().joined == (1,)
    run.assert_whole(4)


def test_learners_are_paused_and_killed_at_their_times_and_come_back(tmp_path: Path) -> None:
    """What cannot happen is said: learner 7 is unknown, and learner 0 runs already."""
    run = Run("adpsgd", 3, tmp_path)
    impossible = (Kill(kill=7, at_seconds=0.0), Join(join=0, at_seconds=0.0))
    kill = (Pause(pause=2, at_seconds=0.0, seconds=0.5), Kill(kill=1, at_seconds=0.1), Join(join=1, at_seconds=0.2))
    run.go(faults=(*impossible, *kill), expect=1)
    assert [loss.learner for loss in run.losses] == [1]
    assert run.joined == [1]
    assert [line for line in run.said if line.startswith("faults: ")] == [
        "faults: learner 7 cannot be killed or paused, because it does not run",
        "faults: learner 0 does not join, because it is already running or starting",
    ]
    run.assert_whole(3)


def test_a_paused_learner_that_the_others_gave_up_is_started_again_when_its_pause_is_over() -> None:
    """Learner 0, which they did not give up, only continues."""
    now, started, sent = 0.0, list[int](), list[int]()

    class Process(LearnerProcess):
        is_running = True

        def signal(self, number: int) -> None:
            sent.append(number)

    roster = Roster(0, clock=lambda: now)
    for learner in range(2):
        roster.start(learner, Process())
    roster.announce(Membership(0, (0, 1)))
    faults = [Pause(pause=learner, at_seconds=0.0, seconds=10.0) for learner in range(2)]
    joiners = Joiners(Changes("continue", faults=faults), roster, started.append)
    joiners.tend(is_ending=False)
    roster.learners[1].process.is_running = False  # type: ignore[misc]
    roster.lose(1, "sent no heartbeat")
    roster.announce(Membership(1, (0,)))
    now = 9.0
    joiners.tend(is_ending=False)
    assert started == []
    now = 10.0
    joiners.tend(is_ending=False)
    assert (started, sent) == ([1], [signal.SIGSTOP, signal.SIGSTOP, signal.SIGCONT])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        pytest.param("fails", "learner 2: the disk of this learner is gone", marks=pytest.mark.soak),
        pytest.param("alien", "differ in configuration: 'another' and 'same'", marks=pytest.mark.soak),
        ("shot", "learner 2 was killed by SIGKILL"),
        pytest.param(
            "stuck", "learner 2 did not meet the others within 30 s|learner 2 sent no heartbeat", marks=pytest.mark.soak
        ),
    ],
)
def test_a_joiner_that_fails_while_it_joins_is_left_out(trouble: str, reason: str, tmp_path: Path) -> None:
    """Before it is ready, or when the others expect it already: they continue, and the request is answered."""
    run = Run(f"allreduce/{trouble}", 2, tmp_path)
    run.expected = 1
    run.is_enough = lambda: bool(run.left_out)  # type: ignore[method-assign]
    run.go(ask_for=(1,))
    assert (run.joined, run.losses) == ([], [])
    (failure,) = run.answer().failed
    assert any(each in failure for each in reason.split("|"))
    run.assert_whole(2)


@pytest.mark.wide
@pytest.mark.parametrize("trouble", ["half-fails", pytest.param("half-shot", marks=pytest.mark.soak)])
def test_half_a_super_learner_does_not_wait_for_ever(trouble: str, tmp_path: Path) -> None:
    """One of two joiners fails, before it is ready or when the others expect both: the other one is left out too, and
    the answer to the request names both."""
    run = Run(f"hadpsgd/{trouble}", 2, tmp_path)
    run.is_enough = lambda: len(run.left_out) >= 2  # type: ignore[method-assign]
    run.go(ask_for=(2,))
    assert (run.joined, run.losses) == ([], [])
    answer = run.answer()
    assert [len(answer.joined), len(answer.failed)] == [0, 2]
    run.assert_whole(2)


@pytest.mark.soak
def test_a_learner_that_dies_before_it_computes_is_not_started_again(tmp_path: Path) -> None:
    """Or there would be no end to it."""
    run = Run("adpsgd/dies", 3, tmp_path)
    run.is_enough = lambda: any("is not restarted" in line for line in run.said)  # type: ignore[method-assign]
    run.go(kill=1, replaces=True)
    assert [loss.learner for loss in run.losses] == [1, 1]
    assert "learner 1 is not restarted, because it had computed nothing since it joined" in run.said
    run.assert_whole(2)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce"])
@pytest.mark.parametrize("margin", [1, 5, 20, 100])
def test_a_learner_that_joins_at_the_very_end_does_no_harm(strategy: str, margin: int, tmp_path: Path) -> None:
    """All end in the old membership, or all in the new one; the answer to the request says which."""
    run = Run(f"{strategy}/late", 3, tmp_path)
    hear = run.on_message
    come = run.hurry.with_name("come")

    def on_message(learner: int, message: LearnerMessage) -> None:
        hear(learner, message)
        told: dict[str, Any] = dict(values_of(message))
        if "waits" in told:
            run.hurry.touch()
        if told.get("step", 0) >= NUM_MINI_BATCHES - margin:
            come.touch()

    run.on_message = on_message  # type: ignore[method-assign]
    run.is_enough = lambda: False  # type: ignore[method-assign]
    run.go(ask_for=(1,))
    assert come.exists()
    assert bool(run.answer().failed) == (not run.joined)
    run.assert_whole(3 + len(run.joined))


def test_who_asks_for_nothing_sensible_is_not_believed(tmp_path: Path) -> None:
    """A file that is no request counts as one for 0 learners; a folder has one launcher."""
    with taking_requests(tmp_path) as requests, taking_requests(tmp_path) as others:
        assert requests is not None
        assert others is None
        for number, content in enumerate((b"[]", b"{", b'{"learners": true}', b'{"learners": 2}')):
            (tmp_path / f"request-{number}.json").write_bytes(content)
        assert [request.learners for request in requests()] == [0, 0, 0, 2]
        assert list(requests()) == []


def test_who_takes_requests_is_told_from_the_launcher_before(tmp_path: Path) -> None:
    """A request to the launcher before is not answered by the next one, which has forgotten it."""
    seen = []
    for _ in range(2):
        with taking_requests(tmp_path):
            seen.append(launcher_id(tmp_path))
            assert launcher_id(tmp_path) == seen[-1]
        assert launcher_id(tmp_path) is None
    assert None not in seen
    assert seen[0] != seen[1]
