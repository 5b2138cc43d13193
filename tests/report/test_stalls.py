"""A stall is explained: which learners wait for which, since when, and what those did last; and not too often."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from starling.engines.processes.stalls import Stall
from starling.launch.messages import Activity, Heartbeat, Reached
from starling.launch.roster import Roster
from starling.reporting.progress import Stalls

BEAT = 0.5


class Run:
    """Learners whose messages are made up, on a clock that moves with their heartbeats."""

    def __init__(self, world: int, long_seconds: float = 10.0) -> None:
        self.now = 1000.0
        self.roster = Roster(world, clock=lambda: self.now)
        self.stalls = Stalls(self.roster, Path("log"), long_seconds)
        self.waits: dict[int, Stall] = {}
        self.silent: set[int] = set()
        self.lines: list[str] = []
        self.number = 0
        for name in range(world):
            self.roster.hear(name, Reached("entered", 0))
            self.roster.hear(name, Activity("computing batch 3 of epoch 2"))

    def wait(self, name: int, what: str, whom: Sequence[int], is_group: bool = False, usual: float = 0.2) -> None:
        """A learner begins to wait."""
        self.number += 1
        self.waits[name] = Stall(what, tuple(whom), is_group, False, 0.0, usual, self.number)

    def go_on(self, seconds: float) -> list[str]:
        """So much time passes; what is said meanwhile."""
        before = len(self.lines)
        for _ in range(int(seconds / BEAT)):
            self.now += BEAT
            for name, wait in self.waits.items():
                self.waits[name] = replace(wait, seconds=wait.seconds + BEAT)
            for name in self.roster.learners.keys() - self.silent:
                self.roster.hear(name, Heartbeat(7, self.waits.get(name)))
            self.lines += [line for _, line in self.stalls.look()]
        return self.lines[before:]


def test_in_a_mean_it_is_who_takes_part_and_does_not_wait_that_is_late() -> None:
    """No learner in the mean knows which one it is; one line says it for all that wait."""
    run = Run(4)
    run.silent.add(2)
    for name in (0, 1, 3):
        run.wait(name, "a mean", [other for other in range(4) if other != name], is_group=True)
    assert run.go_on(9.5) == []
    (line,) = run.go_on(1.5)
    assert line == (
        "learners 0, 1 and 3 have waited 10.5 s in a mean (one every 0.2 s until then) for learner 2: learner 2 has "
        "not sent a heartbeat for 10.5 s; it last reported 10.5 s ago: computing batch 3 of epoch 2; its log: "
        "log/learner-2.log"
    )


def test_who_seemed_late_and_then_waits_too_is_counted_among_those_that_wait() -> None:
    """One came into the mean after the first line: the others are about both, and about whom both wait for."""
    run = Run(3)
    run.silent.add(2)
    run.wait(0, "a mean", [1, 2], is_group=True)
    (line,) = run.go_on(11.0)
    assert line.startswith("learner 0 has waited 10.5 s in a mean (one every 0.2 s until then) for learners 1 and 2: ")
    run.wait(1, "a mean", [0, 2], is_group=True)
    once, both = run.go_on(32.0)
    assert once.startswith("learner 0 has waited 21.0 s in a mean (one every 0.2 s until then) for learner 2: ")
    assert both.startswith(
        "learners 0 and 1 have waited 42.0 s in a mean (one every 0.2 s until then) for learner 2: learner 2 has not "
        "sent a heartbeat for 42.0 s"
    )
    run.waits.clear()
    assert run.go_on(1.0) == ["learners 0 and 1 continue after waiting 43.5 s for learner 2"]


def test_those_that_wait_for_one_learner_as_it_turns_out_are_told_of_together() -> None:
    """At first one waited for two others, and one of these for the third."""
    run = Run(4)
    run.silent.add(3)
    run.wait(0, "a mean", [1, 2, 3], is_group=True)
    run.wait(1, "receiving from learner 3", [3])
    assert len(run.go_on(11.0)) == 2
    run.wait(2, "a mean", [0, 1, 3], is_group=True)
    two, three = run.go_on(32.0)
    assert two.startswith("learners 0 and 1 have waited 21.0 s in ")
    assert three.startswith("learners 0, 1 and 2 have waited 42.0 s in ")


def test_a_wait_is_told_once_and_again_when_it_has_doubled_and_when_it_ends() -> None:
    """A night's hang takes a dozen lines, not thousands."""
    run = Run(2)
    run.wait(0, "a mean", [1], is_group=True)
    lines = run.go_on(90.0)
    assert [line.partition(" in ")[0] for line in lines] == [
        "learner 0 has waited 10.5 s",
        "learner 0 has waited 21.0 s",
        "learner 0 has waited 42.0 s",
        "learner 0 has waited 1 min 24 s",
    ]
    del run.waits[0]
    assert run.go_on(5.0) == ["learner 0 continues after waiting 1 min 30 s for learner 1"]
    assert run.stalls.ended == ["learner 0 continues after waiting 1 min 30 s for learner 1"]


def test_what_is_usual_is_not_told() -> None:
    """Ten times the usual step has to pass, too."""
    run = Run(2)
    run.wait(0, "a mean", [1], is_group=True, usual=8.0)
    assert run.go_on(79.0) == []
    assert len(run.go_on(3.0)) == 1


def test_a_chain_of_waits_is_followed_to_its_end() -> None:
    """0 waits for 1, which waits for 2, which computes: one line for both, with 2 as the cause."""
    run = Run(3)
    run.wait(0, "receiving from learner 1", [1])
    run.wait(1, "receiving from learner 2", [2])
    (line,) = run.go_on(11.0)
    assert line.startswith("learners 0 and 1 have waited 10.5 s in receiving from learner ")
    assert (
        ": learner 2 runs, last heard 0.0 s ago; it last reported 10.5 s ago: computing batch 3 of epoch 2; its log: "
        in line
    )


def test_a_learner_that_has_continued_is_no_longer_counted_among_the_waiting() -> None:
    """What it waits for next is another wait."""
    run = Run(3)
    run.wait(0, "a mean", [2], is_group=True)
    run.wait(1, "a mean", [2], is_group=True)
    assert run.go_on(11.0)[0].startswith("learners 0 and 1 have waited 10.5 s")
    run.wait(1, "receiving from learner 2", [2])
    assert [line.partition(" in ")[0] for line in run.go_on(11.0)] == ["learner 0 has waited 21.0 s"]
    run.waits.clear()
    assert run.go_on(1.0) == ["learners 0 and 1 continue after waiting 22.5 s for learner 2"]


def test_learners_that_all_wait_in_one_thing_are_told_so() -> None:
    """Then it is what is between them that is stuck."""
    run = Run(2)
    for name in (0, 1):
        run.wait(name, "a mean", [1 - name], is_group=True)
    (line,) = run.go_on(11.0)
    assert "all learners that take part wait in it" in line
    assert "log/learner-0.log, log/learner-1.log" in line


def test_who_waits_for_data_is_the_cause_itself() -> None:
    """A slow disk is not another learner's fault."""
    run = Run(2)
    run.wait(0, "data", [])
    run.wait(1, "a mean", [0], is_group=True)
    lines = run.go_on(11.0)
    assert lines == [
        "learner 0 has waited 10.5 s in data (one every 0.2 s until then); learner 1 waits for that; "
        "see log/learner-0.log"
    ]


def test_a_learner_that_was_lost_waits_no_more() -> None:
    """Its last message is not taken for a wait that lasts."""
    run = Run(3)
    run.wait(1, "a mean", [0], is_group=True)
    run.go_on(4.0)
    run.silent.add(1)
    run.roster.lose(1, "learner 1 was killed by SIGKILL (last reported: computing)")
    assert run.go_on(30.0) == []
