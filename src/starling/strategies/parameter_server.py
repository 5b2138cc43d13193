"""Parameter servers: workers compute, servers keep the model."""

from contextlib import suppress

from starling.learner import Learner, LoopEnded
from starling.strategies.base import never, registered
from starling.strategies.parts.remote import Servers
from starling.strategies.parts.rules import ServedStrategy, ServerOptions
from starling.strategies.parts.server import serve


@registered(
    "parameter-server",
    "workers push gradients to servers, which keep the model",
    ServerOptions,
    kind="server",
    sync_group_size=lambda options, world: len(options.workers(world)) if options.update == "hybrid" else 1,
    averages_gradients=lambda options: options.update == "hybrid",
    adopts_changes=never,
    steps_itself=False,
    of=ServedStrategy,
)
async def parameter_server(me: Learner, options: ServerOptions) -> None:
    """Workers push gradients to servers and pull weights; each server steps according to its update rule.

    Equation, with w the servers' weights, one piece on each of S servers::

        worker:  Phi <- w,  push g(Phi)
        server:  w <- w - a G

    with a the step size of the server's optimizer; g the gradient of the worker's mini-batch; G the combination of
    gradients that `options.update` names:

    * `asynchronous`: each gradient when it arrives; w has usually changed since Phi.
    * `summed`: the sum of any n gradients.
    * `hybrid`: the mean of all workers' gradients at the same w.
    * `synchronous`: the gradient of the worker whose turn it is.

    `parts/rules.py` gives the equation of each rule.

    Workers clip gradients, because a server sees only a piece of each. If too few gradients for a sum remain at the end
    of a run, they make the last step. A non-finite gradient is not sent: it makes no step, and a mean or sum contains
    only the other gradients.

    Waits:
        Under `asynchronous` and `summed`, no worker waits for another, except for the slowest one with
        `staleness_bound`. Under `hybrid`, each worker waits for the slowest one in each step. Under `synchronous`, it
        waits for its turn.

    Use when:
        Workers differ in speed, and one optimizer, with one momentum or one set of Adam's moments, should receive all
        gradients. Each server's link carries every worker's gradient: raise `shards` before the link is saturated, or
        use `adpsgd`.

    Args:
        me: The learner that runs this coroutine: a worker, a server, or both.
        options: The update rule, and where the servers run.

    References:
        Dean et al. 2012, "Large Scale Distributed Deep Networks", NIPS (`asynchronous`: Downpour SGD, with shards).
        Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS
        (`staleness_bound`).
        Aji & Heafield 2019, "Making Asynchronous Stochastic Gradient Descent Work for Transformers", arXiv 1906.03496
        (`summed`).
        Zhang et al. 2016, "Staleness-aware Async-SGD for Distributed Deep Learning", arXiv 1511.05950
        (`scale_by_staleness`). `parts/staleness.py` has those of the corrections.
        Amodei et al. 2016, "Deep Speech 2: End-to-End Speech Recognition in English and Mandarin", arXiv 1512.02595,
        compares synchronous and asynchronous SGD on speech.

    Example:
        >>> from starling.toy import regression
        >>> starling.simulate(regression("parameter-server", update="summed", sum=4), learners=4).loss()
        0.01
    """
    await serve(me, options, rule=options)
    if me.rank not in options.workers(me.world):
        return  # it was only a server
    servers, in_turn = Servers(me, options), options.update == "synchronous"  # the first server grants turns for all
    with suppress(LoopEnded):
        await servers.pull(in_turn)
        while me.claim():
            ages = list(servers.ages)
            gradient = me.optimizer.clip(await me.gradient(me.weights))
            await servers.arrive()
            await servers.settle()
            if options.overlaps and gradient is not None:
                gradient = gradient.clone()  # the next gradient overwrites it
            servers.push(gradient, ages)
            if options.overlaps:
                servers.ask()
            else:
                await servers.settle()
                await servers.pull(in_turn)
    servers.leave()
    await servers.arrive()
    await servers.pull(in_turn)
