"""The strategies that agree every few steps, in NumPy: one oracle for each method, from the paper that defines it.

Everywhere x are the learners' weights, one column a learner; a the learning rate of plain SGD, which has no state, so
that what becomes of an optimizer's state does not matter; H `every`. Learners agree after every H steps, and at the end
about what is left.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from starling.configuration import Config
from starling.strategies.parts.means import Compression, TopK
from starling.topology import complete, find_topology
from tests.contract.matrix_form import EncodedMean, Gradient, Matrix, Oracle, Vector, columns, copies, rounded


def ends_a_period(step: int, every: int, steps: int) -> bool:
    """Whether learners agree after this step, of which the first is 1."""
    return step % every == 0 or step == steps


def local_sgd(every: int, compression: Compression = "none") -> Oracle:
    """x_l <- x_l - a g_l, and every H steps x_l <- mean x.

    Stich 2018, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767, Algorithm 1. What travels is
    by how much a learner has moved.
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        x, agreed, mean = copies(start, learners), start, EncodedMean(compression, len(start), learners)
        for k in range(rounds):
            x = x - learning_rate * columns(x, gradient, k)
            if ends_a_period(k + 1, every, rounds):
                agreed = agreed + mean.of(x - agreed[:, None])
                x = copies(agreed, learners)
        return x

    return run


def after_warm_up(warm_up: int, then: Oracle) -> Oracle:
    """Steps with the mean gradient, none of them encoded, and then a method of its own."""

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        first = min(warm_up, rounds)
        w = start
        for k in range(first):
            w = w - learning_rate * columns(copies(w, learners), gradient, k).mean(axis=1)
        skipped = first * learners
        return then(w, lambda at, number: gradient(at, number + skipped), learning_rate, learners, rounds - first)

    return run


def post_local_sgd(warm_up: int, every: int, compression: Compression = "none") -> Oracle:
    """Local SGD whose H is 1 up to step t', and then H.

    Lin et al. 2018, "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217, the definition of post-local SGD.
    For plain SGD, means of weights after each step are means of gradients.
    """
    return after_warm_up(warm_up, local_sgd(every, compression))


def bmuf(
    every: int,
    warm_up: int,
    rate: float = 1.0,
    momentum: float | None = None,
    nesterov: bool = True,
    compression: Compression = "none",
) -> Oracle:
    """G = mean x - W_g; M <- eta M + zeta G; W <- W + M; W_g = W, or W + eta M with Nesterov block momentum.

    Chen & Huo 2016, "Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-Block
    Parallel Optimization and Blockwise Model-Update Filtering", ICASSP, section 2: G(t), Delta(t) (here M), W(t), and
    W_g(t) of classical (CBM) and of Nesterov block momentum (NBM). eta is the block momentum, 1 - 1 / L unless it is
    given; zeta the block learning rate. All learners end with W_g.
    """

    def blocks(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        eta, zeta = 1 - 1 / learners if momentum is None else momentum, rate
        x, mean = copies(start, learners), EncodedMean(compression, len(start), learners)
        w, w_g, m = start, start, np.zeros_like(start)
        for k in range(rounds):
            x = x - learning_rate * columns(x, gradient, k)
            if ends_a_period(k + 1, every, rounds):
                g = mean.of(x - w_g[:, None])
                m = eta * m + zeta * g
                w = w + m
                w_g = w + eta * m if nesterov else w
                x = copies(w_g, learners)
        return x

    return after_warm_up(warm_up, blocks)


def slowmo(every: int, rate: float, momentum: float, compression: Compression = "none") -> Oracle:
    """u <- beta u + (x_0 - x_tau) / a; x_0 <- x_0 - alpha a u.

    Wang et al. 2019, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", arXiv 1910.00643,
    Algorithm 1 and its equations (2) and (3): x_0 is the common start of a period, x_tau the mean after it.
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        x, mean = copies(start, learners), EncodedMean(compression, len(start), learners)
        x_0, u = start, np.zeros_like(start)
        for k in range(rounds):
            x = x - learning_rate * columns(x, gradient, k)
            if ends_a_period(k + 1, every, rounds):
                x_tau = x_0 + mean.of(x - x_0[:, None])
                u = momentum * u + (x_0 - x_tau) / learning_rate
                x_0 = x_0 - rate * learning_rate * u
                x = copies(x_0, learners)
        return x

    return run


class OuterNesterov:
    """The outer optimizer of DiLoCo, which is torch's SGD with Nesterov's momentum, in double precision."""

    def __init__(self, theta: Vector, rate: float, momentum: float) -> None:
        self.parameter = nn.Parameter(torch.tensor(theta))
        self.optimizer = torch.optim.SGD([self.parameter], lr=rate, momentum=momentum, nesterov=momentum > 0.0)

    @property
    def theta(self) -> Vector:
        return self.parameter.detach().numpy().copy()

    def step(self, outer_gradient: Vector) -> None:
        self.parameter.grad = torch.from_numpy(outer_gradient)
        self.optimizer.step()


def diloco(every: int, rate: float, momentum: float, compression: Compression = "none") -> Oracle:
    """D = mean (theta - x_l); theta <- OuterOpt(theta, D); x_l <- theta.

    Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105,
    Algorithm 1, with Nesterov's momentum for OuterOpt (section 3).
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        x, mean = copies(start, learners), EncodedMean(compression, len(start), learners)
        outer = OuterNesterov(start, rate, momentum)
        for k in range(rounds):
            x = x - learning_rate * columns(x, gradient, k)
            if ends_a_period(k + 1, every, rounds):
                outer.step(mean.of(outer.theta[:, None] - x))
                x = copies(outer.theta, learners)
        return x

    return run


def streaming_diloco(
    every: int,
    rate: float,
    momentum: float,
    fragments: int,
    overlap: int,
    blend: float,
    compression: Compression = "none",
) -> Oracle:
    """DiLoCo for each fragment p by itself, t_p = p H / P; what departs at t is merged at t + tau.

    Douillard et al. 2025, "Streaming DiLoCo with Overlapping Communication", arXiv 2501.18512, Algorithm 2: where
    t - t_p mod H = 0, D_p = mean (theta_p - x_p) departs; where t - t_p - tau mod H = 0, theta_p <- OuterOpt(theta_p,
    D_p) and x_p <- alpha x_p + (1 - alpha) theta_p. Fragments are consecutive weights, and the first t is t_p. At the
    end what is under way is merged, and then all fragments agree with alpha = 0.
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        x, size = copies(start, learners), -(-len(start) // fragments)
        places = [slice(first, first + size) for first in range(0, len(start), size)]
        outers = [OuterNesterov(start[place], rate, momentum) for place in places]
        means = [EncodedMean(compression, len(start[place]), learners) for place in places]
        under_way: dict[int, Vector] = {}

        def depart(p: int) -> None:
            under_way[p] = means[p].of(outers[p].theta[:, None] - x[places[p]])

        def merge(p: int, alpha: float) -> None:
            outers[p].step(under_way.pop(p))
            x[places[p]] = alpha * x[places[p]] + (1 - alpha) * outers[p].theta[:, None]

        for k in range(rounds):
            x -= learning_rate * columns(x, gradient, k)
            for p in range(len(places)):
                since = k + 1 - (p + 1) * every // fragments
                if since >= 0 and since % every == 0:
                    depart(p)
                if since >= overlap and (since - overlap) % every == 0:
                    merge(p, blend)
        for p in list(under_way):
            merge(p, blend)
        for p in range(len(places) if rounds else 0):
            depart(p)
            merge(p, 0.0)
        return x

    return run


def noloco(every: int, rate: float, momentum: float, pull: float | None = None) -> Oracle:
    """In random pairs: m <- alpha m - beta mean D - gamma (phi - mean phi), phi <- phi + m, x <- phi, D = phi - x.

    Kolehmainen et al. 2025, "NoLoCo: No-all-reduce Low Communication Training Method for Large Models", arXiv
    2506.10911, its outer step for groups of two; the n-th agreement, from 1, has the n-th pairs. gamma is beta unless
    it is given.
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        pairs, number = find_topology("pairs", learners, seed=11), 0
        phi = x = copies(start, learners)
        m = np.zeros_like(x)
        for k in range(rounds):
            x = x - learning_rate * columns(x, gradient, k)
            if ends_a_period(k + 1, every, rounds):
                number += 1
                mean_of_pair, gamma = pairs.matrix(number), rate if pull is None else pull
                apart = phi - phi @ mean_of_pair
                m = momentum * m - rate * (phi - x) @ mean_of_pair - gamma * apart
                x = phi = phi + m
        return x

    return run


def easgd(every: int, rate: float, compression: Compression = "none") -> Oracle:
    """x_l <- x_l - a g_l - alpha (x_l - c); c <- c + alpha sum (x_l - c), all from the values before the step.

    Zhang et al. 2015, "Deep Learning with Elastic Averaging SGD", arXiv 1412.6651, equations (5) and (6) with
    alpha = beta / L, in every H-th step as in Algorithm 1: where H divides the number of steps made before. beta is the
    `rate`. At the end learners agree once more if it is time to, and all take the centre after one step of it.
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        alpha, mean = rate / learners, EncodedMean(compression, len(start), learners)
        x, c = copies(start, learners), start
        for k in range(rounds):
            step, apart = learning_rate * columns(x, gradient, k), x - c[:, None]
            x = x - step
            if k % every == 0:
                x, c = x - alpha * apart, c + rate * mean.of(apart)
        if rounds and rounds % every == 0:
            apart = x - c[:, None]
            x, c = x - alpha * apart, c + rate * mean.of(apart)
        if rounds:
            c = c + rate * mean.of(x - c[:, None])
        return copies(c, learners)

    return run


def sparta(every: int, share: float) -> Oracle:
    """Every H steps a random share of the weights takes its mean, x_l[S] <- mean x[S]; at the end all weights.

    Beton et al. 2025, "Improving the Efficiency of Distributed Training Using Sparse Parameter Averaging", ICLR
    workshop on modular, collaborative and decentralised deep learning: the update of parameters in the random set. Of
    each of k parts of the vector, one place is drawn.
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        x, size, k = copies(start, learners), len(start), max(1, round(share * len(start)))
        bounds = [number * size // k for number in range(k + 1)]
        for step in range(1, rounds + 1):
            x = x - learning_rate * columns(x, gradient, step - 1)
            if step % every == 0:
                generator = torch.Generator().manual_seed(11 * 1_000_003 + step)
                chances = torch.rand(k, generator=generator, dtype=torch.float64).numpy()
                places = bounds[:-1] + (chances * np.diff(bounds)).astype(int)
                x[places] = x[places].mean(axis=1, keepdims=True)
        return x @ complete(learners) if rounds else x

    return run


def sparseloco(every: int, rate: float, compression: TopK, feedback: float) -> Oracle:
    """e_l <- beta e_l + theta - x_l; q_l = Q(TopK(e_l)); e_l <- e_l - q_l; x_l <- theta <- theta - alpha mean q_l.

    Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706, Algorithm 1. beta
    is `feedback`, alpha the `rate`. The q_l are gathered: their mean is not encoded again.
    """

    def run(start: Vector, gradient: Gradient, learning_rate: float, learners: int, rounds: int) -> Matrix:
        x, theta = copies(start, learners), start
        e = np.zeros_like(x)
        for k in range(rounds):
            x = x - learning_rate * columns(x, gradient, k)
            if ends_a_period(k + 1, every, rounds):
                e = feedback * e + (theta[:, None] - x)
                q = np.stack([rounded(each, compression) for each in e.T], axis=1)
                e = e - q
                theta = theta - rate * q.mean(axis=1)
                x = copies(theta, learners)
        return x

    return run


METHODS: dict[str, Callable[..., Oracle]] = {
    "local-sgd": local_sgd,
    "post-local-sgd": post_local_sgd,
    "bmuf": bmuf,
    "slowmo": slowmo,
    "diloco": diloco,
    "streaming-diloco": streaming_diloco,
    "noloco": noloco,
    "easgd": easgd,
    "sparta": sparta,
    "sparseloco": sparseloco,
}


def periodic(method: str, options: Config) -> Oracle:
    """The oracle of a method with these options. What becomes of an optimizer's state does not matter."""
    return METHODS[method](**{name: value for name, value in options if name != "optimizer_state"})
