"""Write docs/strategies/interactive.html, which compares strategies: `python docs/pictures/interactive.py [NAME...]`.

Everything that the page draws is a run on the virtual engine (events.py). The page holds one run for each strategy and
each position of its sliders. To record all takes some ten minutes on two cores; with names of `SHOWN`, the script
records only these, and keeps the other runs that the page holds.
"""

import base64
import gzip
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from draw import TIMELINES
from events import GRADIENT_SECONDS, SLOW, Events, record
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from svg import DARK, LIGHT, rules
from timelines import joined

from starling.budget import Budget
from starling.strategies import STRATEGIES

PAGE = Path(__file__).resolve().parents[1] / "strategies" / "interactive.html"
LEARNERS = (2, 4, 8)
SLOWNESS = (1, 2, 3, 5, 10)
"""How many times as long learner 0 takes for a gradient as the others."""
SENDING = (0.01, 0.03, 0.1, 0.3)
"""The seconds that all weights take from one learner to another."""
SETTINGS = tuple(product(LEARNERS, SLOWNESS, SENDING))
FIRST = (4, 3, 0.03)
"""The setting that the page opens with: that of the pictures."""
DRAWN, SECONDS = 4.0, 12.0
"""The simulated seconds that the page draws, from the beginning, and those that its figures are about."""
UNIT = 0.002
"""The page holds times as multiples of this many seconds, which is less than a pixel."""
_EVERY: Mapping[str, Any] = {"every": 3}
_WITHOUT_PICTURE = (
    dict.fromkeys(("diloco", "slowmo", "easgd", "sparseloco", "gossip-pga"), _EVERY)
    | {name: {} for name in ("sparta", "a2cid2", "choco", "d2", "gradient-tracking", "qg-dsgdm")}
    | {"bmuf": _EVERY | {"warm_up": 0}, "post-local-sgd": _EVERY | {"warm_up": 4}}
    | {"aeasgd": _EVERY | {"servers": "own"}}
)
"""The options of strategies that have no timeline of their own."""
SHOWN = {name: (waits.strategy, waits.options) for name, waits in TIMELINES.items()} | {
    name: (name, options) for name, options in _WITHOUT_PICTURE.items()
}
"""Strategies and options by their names on the page."""

Run = list[list[int]]
"""A run in columns of whole numbers; see `columns`."""


def run(name: str, learners: int, slower: float, sending: float) -> Run:
    """Run one of `SHOWN` in one setting."""
    strategy, chosen = SHOWN[name]
    options = dict(chosen)
    if "quorum" in options:
        options["quorum"] = max(1, learners - 1)
    budget = Budget(minutes=SECONDS / 60)
    return columns(record(strategy, options, learners, slower, sending, budget), learners)


def columns(events: Events, learners: int) -> Run:
    """What the page needs of a run: its figures, then what it draws.

    The figures are the number of gradients, the thousandths of its time that the slow learner waits, the same of the
    other learners, and a hundred times the mean staleness, and the largest. A stretch of time is a gap since the end of
    the one before in the same row, and a length.
    """
    works = [_works(events, rank) for rank in range(learners)]
    waits = [1000 * (1 - sum(min(end, SECONDS) - begin for begin, end in each) / SECONDS) for each in works]
    ended = [
        events.staleness[rank, place]
        for rank in range(learners)
        for place, gradient in enumerate(events.of(rank))
        if gradient.end <= SECONDS
    ]
    others = [wait for rank, wait in enumerate(waits) if rank != SLOW]
    stale = (100 * sum(ended) / len(ended), max(ended))
    gradients = [[(each.begin, each.end) for each in events.of(rank)] for rank in range(learners)]
    shown = [events.staleness[rank, place] for rank in range(learners) for place in range(_num(gradients[rank]))]
    lanes = [[(each.begin, each.end) for each in events.averagings if each.rank == rank] for rank in range(learners)]
    steps = [
        [(each.begin, each.end) for each in events.on_shards(rank) if each.is_step] for rank in range(learners + 1)
    ]
    means = sorted((each for each in events.means if each.begin < DRAWN), key=lambda each: (each.begin, each.group))
    messages = sorted(
        (each for each in events.messages if each.begin < DRAWN), key=lambda each: (each.begin, each.sender)
    )
    return [
        [len(ended), round(waits[SLOW]), round(sum(others) / len(others)), *map(round, stale)],
        *_stretches(gradients),
        shown,
        *_stretches([joined(each) for each in lanes] if not events.shard_works else []),
        *_stretches([joined(each) for each in steps]),
        [each.group[0] for each in means],
        [each.group[-1] for each in means],
        [int(each.of_gradients) for each in means],
        *_times(means),
        [each.sender for each in messages],
        [each.receiver for each in messages],
        *_times(messages),
        _gaps(_units(each) for each in events.rounds[:-1] if each < DRAWN),
    ]


def _works(events: Events, rank: int) -> list[tuple[float, float]]:
    """When a learner computed or changed a model in host memory."""
    both = (*events.of(rank), *events.on_shards(rank))
    return joined((each.begin, each.end) for each in both if each.begin < SECONDS)


def _num(stretches: Sequence[tuple[float, float]]) -> int:
    return sum(begin < DRAWN for begin, _ in stretches)


def _units(seconds: float) -> int:
    return round(seconds / UNIT)


def _gaps(units: Iterable[int]) -> list[int]:
    return [after - before for before, after in pairwise([0, *units])]


def _times(events: Sequence[Any]) -> tuple[list[int], list[int]]:
    """When events begin, each since the one before, and how long they take."""
    begins = [_units(each.begin) for each in events]
    return _gaps(begins), [_units(each.end) - begin for each, begin in zip(events, begins, strict=True)]


def _stretches(rows: Sequence[Sequence[tuple[float, float]]]) -> tuple[list[int], list[int], list[int]]:
    """The number of stretches in each row, and all their gaps and lengths."""
    gaps, lengths = [], []
    for row in rows:
        over = 0
        for begin, end in row[: _num(row)]:
            gaps.append(_units(begin) - over)
            over = _units(end)
            lengths.append(over - _units(begin))
    return [_num(row) for row in rows], gaps, lengths


def runs(name: str) -> list[Run]:
    """The runs of one of `SHOWN` in all settings, by column and then by setting, which packs best."""
    return list(map(list, zip(*(run(name, *setting) for setting in SETTINGS), strict=True)))


@dataclass(frozen=True)
class Packed:
    """The runs of all strategies, packed as text."""

    texts: Mapping[str, str]
    """By strategy, without those that are equal to an earlier one's."""
    of: Mapping[str, str]
    """The strategy whose text holds the runs of each."""

    def runs(self, name: str) -> list[Run]:
        """The runs of a strategy, by column and then by setting."""
        found: list[Run] = json.loads(gzip.decompress(base64.b64decode(self.texts[self.of[name]])))
        return found


def packed(recorded: Mapping[str, list[Run]]) -> Packed:
    """Pack the runs of strategies."""
    first: dict[str, str] = {}
    of = {name: first.setdefault(json.dumps(each, separators=(",", ":")), name) for name, each in recorded.items()}
    squeezed = {name: gzip.compress(text.encode(), 9, mtime=0) for text, name in first.items()}
    return Packed({name: base64.b64encode(each).decode() for name, each in squeezed.items()}, of)


def held(page: str) -> Packed:
    """The runs that a page holds."""
    (listed,) = re.findall(r'id="strategies">(.*?)</script>', page)
    return Packed(
        dict(re.findall(r'id="runs-([\w-]+)">([\w+/=]+)<', page)),
        {name: each["runs"] for name, each in json.loads(listed).items()},
    )


def page(runs: Packed) -> str:
    """The text of the page, with strategies in the order of `starling strategies`."""
    kinds = list(dict.fromkeys(each.kind for each in STRATEGIES.values()))
    strategies = {
        name: {
            "kind": STRATEGIES[strategy].kind,
            "strategy": strategy,
            "title": strategy + _in_words(options),
            "sentence": _first_sentence(strategy),
            "page": f"{strategy}.md",
            "runs": runs.of[name],
            "server": options.get("servers") == "own",
        }
        for name, (strategy, options) in sorted(
            SHOWN.items(), key=lambda each: kinds.index(STRATEGIES[each[1][0]].kind)
        )
    }
    setting = {"learners": LEARNERS, "slowness": SLOWNESS, "sending": SENDING, "first": FIRST}
    times = {"unit": UNIT, "drawn": DRAWN, "seconds": SECONDS, "gradient": GRADIENT_SECONDS}
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, autoescape=True)
    templates.policies["json.dumps_kwargs"] = {}  # keep the order of keys
    template = templates.get_template("interactive.html.jinja")
    colours = {"light": rules(LIGHT), "dark": rules(DARK), "paper": LIGHT, "night": DARK}
    return template.render(strategies=strategies, given=setting | times, texts=runs.texts, **colours) + "\n"


def _first_sentence(strategy: str) -> str:
    return (STRATEGIES[strategy].run.__doc__ or "").partition("\n")[0].replace("`", "")


def _in_words(options: Mapping[str, Any]) -> str:
    """The options that readers may set otherwise, in brackets."""
    chosen = {key: value for key, value in options.items() if key not in ("servers", "piece_megabytes")}
    chosen |= {"quorum": "L − 1"} if "quorum" in options else {}
    words = ", ".join(key if value is True else f"{key} {value}" for key, value in chosen.items())
    return f" ({words})" if words else ""


def main(names: Sequence[str]) -> None:
    """Record the runs of some of `SHOWN`, and write the page with these and those that it already holds."""
    before = held(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else Packed({}, {})
    recorded = {name: before.runs(name) for name in before.of if name in SHOWN}
    with ProcessPoolExecutor(initializer=partial(torch.set_num_threads, 1)) as pool:
        recorded |= zip(names, pool.map(runs, names), strict=True)
    PAGE.write_text(page(packed(recorded)), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(SHOWN))
