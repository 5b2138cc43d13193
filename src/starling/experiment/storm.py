"""A storm: learners are killed and replaced, paused, and cut off from the others at random times."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from starling.experiment.task import load_recipe
from starling.reporting.progress import Say
from starling.training.faults import Fault, Join, Kill, Pause, Split

Seconds = float
PER_HOUR = 3600.0


def storm_recipe(
    path: Path,
    overrides: Sequence[str],
    tell: Say,
    console: Console,
    *,
    minutes: float,
    slow: float,
    seed: int,
    is_real: bool,
    settings: Mapping[str, float],
) -> None:
    """Train the recipe in a file through a storm of `minutes` minutes, with real learners or in a simulation. One
    learner, which the seed chooses, is `slow` times slower than the others. `settings` are those of `storm`."""
    _, recipe = load_recipe(path, overrides)
    faults = storm(recipe.learners, 60.0 * minutes, seed=seed, **settings)
    listed = [fault.model_dump(mode="json", exclude_none=True) for fault in faults]
    name = [] if any(each.startswith("name=") for each in overrides) else [f"name={recipe.name}-storm"]
    budget = f"budget={{epochs: null, steps: null, minutes: {minutes}}}"
    slowest = random.Random(seed).randrange(recipe.learners)
    slowed = [f"stragglers.slow={{{slowest}: {slow}}}"] if slow > 1.0 else []
    changed = [*overrides, *name, budget, "on_loss=continue", *slowed, f"faults={json.dumps(listed)}"]
    counts = ", ".join(
        f"{sum(isinstance(fault, kind) for fault in faults)} {word}"
        for kind, word in ((Kill, "kills"), (Pause, "pauses"), (Split, "cuts"))
    )
    if not faults:
        tell("warning: the storm has no faults; it needs at least two learners, and more faults in an hour or minutes")
    tell(f"storm of seed {seed}, {minutes:g} minutes, {recipe.learners} learners: {counts}")
    if is_real:
        from starling.experiment.train import train_recipe

        train_recipe(path, changed, tell, console, "starling storm")
    else:
        from starling.experiment.simulate import simulate_recipe

        simulate_recipe(*load_recipe(path, changed, command="starling storm"), tell, console)


def storm(
    learners: int,
    seconds: Seconds,
    *,
    faults_per_hour: float = 70.0,
    pauses: float = 0.25,
    cuts_per_hour: float = 0.0,
    away: Seconds = 10.0,
    seed: int = 1,
) -> tuple[Fault, ...]:
    """Return the faults of a storm, in the order of their times. The same arguments give the same faults.

    Faults and cuts come at random, as in two Poisson processes. Each hits one of the learners that work then; at least
    one learner is always spared.

    Args:
        learners: The number of learners.
        seconds: The length of the storm.
        faults_per_hour: The mean number of kills and pauses in an hour, of all learners together.
        pauses: The fraction of faults that are pauses.
        cuts_per_hour: The mean number of times in an hour that the network cuts one learner off; in simulations only.
        away: The time after which a killed learner is started again, and the length of a pause or a cut.
        seed: The seed of the storm.
    """
    chance, now, per_second = random.Random(seed), 0.0, (faults_per_hour + cuts_per_hour) / PER_HOUR
    works_from, found = [0.0] * learners, list[Fault]()
    while per_second > 0.0 and (now := now + chance.expovariate(per_second)) < seconds:
        is_cut = chance.random() * (faults_per_hour + cuts_per_hour) < cuts_per_hour
        is_pause, at = chance.random() < pauses, round(now, 1)
        working = [learner for learner, since in enumerate(works_from) if since <= now]
        if len(working) < 2:
            continue
        works_from[hit := chance.choice(working)] = now + away
        if is_cut:
            found.append(Split(split=(hit,), at_seconds=at, seconds=away))
        elif is_pause:
            found.append(Pause(pause=hit, at_seconds=at, seconds=away))
        else:
            found += [Kill(kill=hit, at_seconds=at), Join(join=hit, at_seconds=round(now + away, 1))]
    return tuple(found)
