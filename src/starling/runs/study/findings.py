"""What a study found, in words. Every sentence is computed from the results, and says what they cannot show."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starling.runs.study.answers import answers
from starling.runs.study.arms import ARMS
from starling.runs.study.contrasts import contrast_sections
from starling.runs.study.grid import Setting
from starling.runs.study.intervals import Estimate, difference, estimate
from starling.runs.study.outcomes import LEARNED_NOTHING, Outcomes
from starling.runs.study.words import listed, settings, verdict


@dataclass(frozen=True)
class Effect:
    """What one arm does that another does not."""

    title: str
    before: str
    after: str


EFFECTS = (
    Effect("N times the batch, nothing late", "one", "batch"),
    Effect("Staleness alone", "one", "delay"),
    Effect("Asynchronous updates", "one", "asynchronous"),
    Effect("Summing arriving gradients, against applying each", "asynchronous", "summed"),
    Effect("What is still late under the sum", "batch", "summed"),
)


def findings(outcomes: Outcomes, name: str) -> list[str]:
    """The page, line by line."""
    num_diverged = sum(result.diverged for result in outcomes.results)
    diverged = "; one whose numbers stopped being finite counts as 100 %" if num_diverged else ""
    lines = [
        f"# What was found: {name}",
        "",
        f"{len(outcomes.results)} runs, {num_diverged} of which diverged{diverged}. Differences are in points of word "
        "error rate, more is worse; they are paired by seed, and their intervals are 95 % by Student's t over seeds, "
        f"of which there are {len(outcomes.seeds)} at most. Where both sides have at least {LEARNED_NOTHING:g} % of "
        "words wrong, neither learned and nothing is compared. Among so many intervals about one in twenty is wrong "
        "by chance.",
        "",
        *_baseline(outcomes),
        *answers(outcomes),
    ]
    for effect in EFFECTS:
        if {effect.before, effect.after} <= set(outcomes.arms):
            lines += [
                "",
                f"## {effect.title}: `{effect.after}` against `{effect.before}`",
                "",
                *_effect(outcomes, effect),
            ]
    return [*lines, *contrast_sections(outcomes)]


def _baseline(outcomes: Outcomes) -> Iterator[str]:
    """How well the small batch learns where nothing is late: without that nothing else means much."""
    if "one" not in outcomes.arms:
        return
    for model in outcomes.models:
        parts = []
        for optimizer in outcomes.optimizers:
            wers = [
                wer
                for warmup in outcomes.warmups
                for wer in outcomes.wers(Setting(model, optimizer, warmup), "one", None).values()
            ]
            if wers:
                parts.append(f"{estimate(wers).mean:.1f} % with {optimizer}")
        yield f"- One learner, {model}: {listed(parts)}, on average over warm-ups and seeds."


def _effect(outcomes: Outcomes, effect: Effect) -> Iterator[str]:
    """How often an effect shows, then every single difference."""
    tally, lines = Counter[str](), []
    for model in outcomes.models:
        for optimizer in outcomes.optimizers:
            for workers in _worker_numbers(outcomes, effect):
                said = []
                for warmup in outcomes.warmups:
                    setting = Setting(model, optimizer, warmup)
                    words = _one_difference(outcomes, effect, setting, workers, tally)
                    if words:
                        said.append(f"{_warmup(warmup)} {words}")
                if said:
                    number = "" if workers is None else f", {workers} workers"
                    lines.append(f"- {model}, {optimizer}{number}: {'; '.join(said)}.")
    yield from ([_counts(tally), "", *lines] if lines else ["Not measured."])


def _one_difference(
    outcomes: Outcomes, effect: Effect, setting: Setting, workers: int | None, tally: Counter[str]
) -> str | None:
    before, after = (outcomes.wers(setting, arm, workers) for arm in (effect.before, effect.after))
    found = difference(before, after)
    if found is None:
        return None
    common = before.keys() & after.keys()
    rates = " → ".join(f"{estimate([each[seed] for seed in common]).mean:.1f}" for each in (before, after))
    if not (outcomes.learned(setting, effect.before, workers) or outcomes.learned(setting, effect.after, workers)):
        found = None
    tally[_outcome(found)] += 1
    return f"{rates}, {_outcome(found) if found is None else verdict(found, 'worse', 'better')}"


def _outcome(found: Estimate | None) -> str:
    """What a difference counts as; None where neither side learned."""
    if found is None:
        return "neither learned"
    if found.half is None:
        return "only one seed, and hence no interval"
    return {1: "worse", -1: "better", 0: "no difference that the seeds can show"}[found.sign]


def _counts(tally: Counter[str]) -> str:
    """Of how many settings what is true."""
    parts = [f"{words} in {count}" for words, count in tally.most_common()]
    return f"Of {settings(tally.total())}: {listed(parts)}."


def _worker_numbers(outcomes: Outcomes, effect: Effect) -> Sequence[int | None]:
    depends = ARMS[effect.before].depends or ARMS[effect.after].depends
    return outcomes.workers if depends else [None]


def _warmup(share: float) -> str:
    return f"warm-up {share:g}:" if share else "no warm-up:"
