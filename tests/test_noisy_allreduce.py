"""`allreduce` with noisy weights: the mean of the learners is that of `allreduce`, and the noise has its length."""

from collections.abc import Callable

import pytest
import torch

from benchmarks.noisy_allreduce import NOISY_ALLREDUCE
from starling import simulate
from starling.toy import regression

NAME = "benchmarks.noisy_allreduce:NOISY_ALLREDUCE"


def test_without_noise_it_is_allreduce() -> None:
    plain = simulate(regression("allreduce"), learners=4).model()
    found = simulate(regression(NAME, distance=0.0), learners=4).model()
    for one, other in zip(plain.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_noise_changes_the_gradients_and_still_learns() -> None:
    plain, noisy = simulate(regression("allreduce"), learners=4), simulate(regression(NAME, distance=0.01), learners=4)
    differences = [
        float((one - other).detach().abs().max())
        for one, other in zip(plain.model().parameters(), noisy.model().parameters(), strict=True)
    ]
    assert 0.0 < max(differences) < 0.1
    assert noisy.loss() < 0.1


@pytest.mark.parametrize("distance", [0.75, 3.0])
def test_the_noise_is_as_long_as_its_equation_says(distance: float) -> None:
    """On learners whose gradients are known, the squared length is c a^2 |g_l - mean|^2."""
    gradients = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    places: list[torch.Tensor] = []
    _run(NOISY_ALLREDUCE.run, NOISY_ALLREDUCE.options(distance=distance), gradients, 0.5, places)
    mean = gradients.mean(0)
    first, second = places  # of learner 0: without noise, then with that of its first gradient
    assert torch.equal(first, torch.zeros(3))
    length = float((second + 0.5 * mean).norm())
    assert length == pytest.approx((distance**0.5) * 0.5 * float((gradients[0] - mean).norm()), rel=1e-5)


class _Value:
    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def __await__(self):  # type: ignore[no-untyped-def]
        return self._value
        yield


class _Learner:
    """Learner 0 of two that always have the same gradients; two steps."""

    rank, seed = 0, 1

    def __init__(self, gradients: torch.Tensor, rate: float, places: list[torch.Tensor]) -> None:
        self.weights, self._gradients, self._rate, self._places = torch.zeros(3), gradients, rate, places
        self.optimizer, self._num_claims = self, 0

    def claim(self) -> bool:
        self._num_claims += 1
        return self._num_claims <= 2

    def gradient(self, at: torch.Tensor) -> _Value:
        self._places.append(at)
        return _Value(self._gradients[0])

    def mean(self, _: torch.Tensor) -> _Value:
        return _Value(self._gradients.mean(0))

    def learning_rate(self) -> float:
        return self._rate

    def step(self, gradient: torch.Tensor) -> None:
        self.weights = self.weights - self._rate * gradient


def _run(run: Callable[..., object], options: object, gradients: torch.Tensor, rate: float, places: list) -> None:  # type: ignore[type-arg]
    coroutine = run(_Learner(gradients, rate, places), options)
    with pytest.raises(StopIteration):
        coroutine.send(None)  # type: ignore[attr-defined]
