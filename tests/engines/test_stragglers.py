"""Slowness on purpose: as much as was asked for, and the same every time."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from starling.configuration import checked
from starling.errors import ConfigError
from starling.experiment.simulate import simulate
from starling.recipe.run import RunConfig
from starling.toy import regression
from starling.training.speeds import Delays, Stragglers


def delays(section: dict[str, object], rank: int = 0, seed: int = 1, count: int = 6) -> list[float]:
    """What a learner waits after each of `count` gradients of 2 s."""
    mine = Delays(Stragglers.model_validate(section), seed, rank)
    return [mine.after(2.0) for _ in range(count)]


def test_nothing_asked_for_is_no_delay() -> None:
    """A recipe without stragglers runs as it always did."""
    assert delays({}) == [0.0] * 6


@pytest.mark.parametrize("factor", ["10x", 10, 10.0, "10"])
def test_a_slow_learner_takes_so_many_times_as_long(factor: object) -> None:
    """10x waits nine times what the gradient took; `10` and `10x` are one, and the others are not slowed."""
    assert delays({"slow": {3: factor}}, rank=3) == [18.0] * 6
    assert delays({"slow": {3: factor}}, rank=2) == [0.0] * 6


@pytest.mark.parametrize("slow", [{}, {0: "3x"}], ids=["at its own speed", "slowed down"])
def test_jitter_has_the_mean_that_was_asked_for(slow: dict[int, str]) -> None:
    """A share of the gradient's time, of the slowed time where it is slowed, exponentially distributed."""
    factor = 3.0 if slow else 1.0
    extra = [each - 2.0 * (factor - 1.0) for each in delays({"slow": slow, "jitter": 0.25}, count=20_000)]
    mean = sum(extra) / len(extra)
    assert mean == pytest.approx(2.0 * factor * 0.25, rel=0.03)
    deviation = (sum((each - mean) ** 2 for each in extra) / len(extra)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.05)
    assert min(extra) >= 0.0


def test_a_job_takes_stragglers_as_a_mapping_and_names_a_wrong_key() -> None:
    """The class of the section is not a public name."""
    assert replace(regression("adpsgd"), stragglers={"slow": {3: "4x"}}).stragglers.slow == {3: 4.0}  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"job: a problem\n  stragglers\.slo: unknown key; did you mean stragglers\.slow"
    ):
        replace(regression("adpsgd"), stragglers={"slo": {3: "4x"}})  # type: ignore[arg-type]


def test_a_simulation_computes_with_one_thread_and_restores_the_number() -> None:
    """More threads slow each other down on a busy machine, and change the last digits."""
    before, used = torch.get_num_threads(), []

    def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        used.append(torch.get_num_threads())
        return torch.optim.SGD(parameters, lr=0.1)

    torch.set_num_threads(2)
    try:
        simulate(replace(regression("adpsgd"), make_optimizer=make_optimizer), 2)
        assert set(used) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_pause_comes_once_at_its_gradient() -> None:
    """After the gradient that it names, of the learner that it names, and never again."""
    section = {"pauses": [{"learner": 1, "after": 3, "seconds": 5}, {"learner": 0, "after": 1, "seconds": 7}]}
    assert delays(section, rank=1) == [0.0, 0.0, 5.0, 0.0, 0.0, 0.0]


def test_two_pauses_at_one_gradient_add_up() -> None:
    """The second does not replace the first."""
    section = {"pauses": [{"learner": 0, "after": 2, "seconds": seconds} for seconds in (5, 0.5)]}
    assert delays(section, count=3) == [0.0, 5.5, 0.0]


def test_every_learner_and_seed_has_a_stream_of_its_own() -> None:
    """The same again for the same learner and seed, other delays for others."""
    drawn = delays({"jitter": 0.5})
    assert delays({"jitter": 0.5}) == drawn
    assert not set(delays({"jitter": 0.5}, rank=1)) & set(drawn)
    assert not set(delays({"jitter": 0.5}, seed=2)) & set(drawn)


@pytest.mark.parametrize(
    "section",
    [
        {"slow": {0: "0.5x"}},
        {"slow": {0: "fast"}},
        {"slow": {-1: 2}},
        {"slow": {0: float("inf")}},
        {"jitter": -0.1},
        {"jitter": float("nan")},
        {"pauses": [{"learner": 0, "after": 0, "seconds": 1}]},
        {"pauses": [{"learner": -1, "after": 1, "seconds": 1}]},
        {"pauses": [{"learner": 0, "after": 1, "seconds": 0}]},
    ],
)
def test_what_cannot_be_a_delay_is_refused(section: dict[str, object]) -> None:
    """Nobody can be sped up, wait for ever, or pause before the first gradient."""
    with pytest.raises(ValidationError):
        Stragglers.model_validate(section)


def test_entries_for_learners_that_are_not_there_are_named() -> None:
    """By their key, the last learner that exists beside them."""
    slow, pauses = {1: 2, 4: 2}, [{"learner": 0, "after": 1, "seconds": 1}, {"learner": 9, "after": 1, "seconds": 1}]
    tree = {"name": "r", "budget": {"steps": 1}, "stragglers": {"slow": slow, "pauses": pauses}}
    with pytest.raises(ConfigError) as caught:
        checked(RunConfig, tree | {"learners": 4}, "r.yaml")
    assert str(caught.value).splitlines()[1:] == [
        "  stragglers.slow.4: there is no learner 4 among 4; the last is learner 3",
        "  stragglers.pauses.1.learner: there is no learner 9 among 4; the last is learner 3",
    ]
    assert checked(RunConfig, tree | {"learners": 10}, "r.yaml").stragglers.slow == slow
