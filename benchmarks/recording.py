"""What it costs to record the order of an asynchronous run."""

import time
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import starling
from benchmarks.measuring import Bar, Seconds, median_speed_up, milliseconds_of_both
from starling.events import Stream
from starling.experiment.record import events_in, segments
from starling.toy import regression

GRADIENT: Seconds = 0.016
PAIRS = 300
OF_A_REPLAY = {"membership", "batch", "turns", "barrier", "cut", "state"}


def measure(folder: Path) -> list[Bar]:
    """Time per gradient that recording takes, as a share of 16 ms; and a gradient with and without it, alternately."""
    job = regression("adpsgd")
    with (folder / "screen").open("w") as screen:
        trained = starling.train(job, learners=2, name="recorded", exp=folder, console=Console(file=screen))
    own = by_gradient(trained.folder)
    stream, spent = Stream(folder / "again.jsonl"), 0.0
    for events in own:
        spent += written(stream, events)
    size = (folder / "again.jsonl").stat().st_size / len(own)
    share = spent / len(own) / GRADIENT
    num_turns = sum(event["kind"] == "turns" for events in own for event in events) / len(own)
    detail = f"{1e6 * spent / len(own):.1f} us, {size:.0f} bytes, {num_turns:.2f} events of turns a gradient"
    pairs = both(stream, own)
    return [
        Bar.at_most("recording the order / a gradient of 16 ms", share, 0.01, detail),
        Bar.at_least(
            "a gradient / one with its order recorded", median_speed_up(pairs), 0.99, milliseconds_of_both(pairs)
        ),
    ]


def by_gradient(experiment: Path) -> list[list[dict[str, Any]]]:
    """The events that a replay needs, of each gradient of learner 0."""
    found: list[list[dict[str, Any]]] = []
    for segment in segments(experiment / "seen"):
        for learner, _, event in events_in(segment):
            if learner == 0 and event is not None and event["kind"] in OF_A_REPLAY:
                if event["kind"] == "batch":
                    found.append([])
                if found:
                    found[-1].append({name: value for name, value in event.items() if name != "crc"})
    return found


def written(stream: Stream, events: list[dict[str, Any]]) -> Seconds:
    begin = time.perf_counter()
    for event in events:
        stream.append(**event)
    return time.perf_counter() - begin


def both(stream: Stream, own: list[list[dict[str, Any]]]) -> list[tuple[Seconds, Seconds]]:
    """Seconds of a gradient with its events written, and of one without, which comes first in every other pair."""
    model = nn.Sequential(*(nn.Linear(640, 640) for _ in range(6)))
    inputs, threads = torch.randn(128, 640), torch.get_num_threads()
    torch.set_num_threads(1)

    def gradient(events: list[dict[str, Any]]) -> Seconds:
        begin = time.perf_counter()
        model(inputs).square().mean().backward()
        written(stream, events)
        return time.perf_counter() - begin

    pairs: list[tuple[Seconds, Seconds]] = []
    for number, events in zip(range(PAIRS), cycle(own)):
        if number % 2:
            without = gradient([])
            pairs.append((gradient(events), without))
        else:
            recorded = gradient(events)
            pairs.append((recorded, gradient([])))
    torch.set_num_threads(threads)
    return pairs
