"""Transcripts that do not fit: good and poor recognisers find swapped ones, and few right ones raise an alarm."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from planned import epoch_of, planner_of
from tones import WORDS, song_set

from starling.chance import derive_seed
from starling.speech.augmentation import AugmentConfig
from starling.speech.batch_plan import BatchConfig
from starling.speech.check.corpus import log_likelihoods, misfits, usual_limit
from starling.speech.check.findings import (
    HEARD_LIST,
    CheckConfig,
    Finding,
    Report,
    SetHeard,
    SetSize,
    to_drop,
    write_report,
)
from starling.speech.check.recordings import Record, collect, prepared_sources
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import model_config
from starling.speech.recogniser import Recogniser
from starling.speech.store import SpeechSet
from starling.speech.tokens import TokenConfig, make_tokenizer
from starling.speech.training.workload import load_batch, speech_loss

SWAPS = ((3, 40), (17, 71), (25, 90))


def _train(songs: SpeechSet, epochs: int) -> Recogniser:
    tokenizer = make_tokenizer(TokenConfig(), [songs.text(index) for index in range(len(songs))])
    features = LogMel(FeatureConfig(normalise="global"), songs.sampling_rate)
    features.fit(songs)
    recogniser = Recogniser.create(model_config(preset="tiny"), features, tokenizer, seed=1)
    optimizer = torch.optim.Adam(recogniser.model.parameters(), lr=1e-2)
    planner = planner_of(songs.durations, np.zeros(len(songs), np.int32), BatchConfig(max_duration=10), seed=1)
    for epoch in range(epochs):
        for number, mini in enumerate(epoch_of(planner, epoch)):
            seed = derive_seed(1, "batch", epoch, number)
            batch = load_batch(songs, mini[0], features, AugmentConfig.none(), tokenizer, seed)
            optimizer.zero_grad()
            speech_loss(recogniser.model, batch, model_config()).backward()
            torch.nn.utils.clip_grad_norm_(recogniser.model.parameters(), 5.0)
            optimizer.step()
    return recogniser


@pytest.fixture(scope="module")
def songs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("songs")
    song_set(folder / "train", 120)
    return folder


@pytest.fixture(scope="module")
def good(songs: Path) -> Recogniser:
    return _train(SpeechSet.open(songs / "train"), 16)


@pytest.fixture(scope="module")
def poor(songs: Path) -> Recogniser:
    return _train(SpeechSet.open(songs / "train"), 5)


@pytest.fixture(scope="module")
def clean(songs: Path) -> list[Record]:
    (source,) = prepared_sources(songs, ["train"])
    records, faults = collect(source, CheckConfig(), lambda *_: None)
    assert not faults
    return records


@pytest.fixture
def planted(clean: list[Record]) -> list[Record]:
    """The corpus with three pairs of swapped transcripts, which have different words, and one with wrong words."""
    records = list(clean)
    for first, second in SWAPS:
        own, other = clean[first].text, clean[second].text
        assert sorted(own.split()) != sorted(other.split())
        records[first], records[second] = replace(clean[first], text=other), replace(clean[second], text=own)
    words = clean[50].text.split()
    wrong = {word: list(WORDS)[(place + 1) % len(WORDS)] for place, word in enumerate(WORDS)}
    records[50] = replace(clean[50], text=" ".join(wrong[word] for word in words))
    return records


def _hear(records: Sequence[Record], recogniser: Recogniser) -> tuple[SetHeard, list[Finding]]:
    return misfits("train", records, recogniser, CheckConfig(), lambda *_: None)


def _partners() -> dict[str, str]:
    pairs = [(f"song-{first}", f"song-{second}") for first, second in SWAPS]
    return dict([*pairs, *((second, first) for first, second in pairs)])


def test_likelihoods_are_sums_over_all_alignments() -> None:
    """All paths of four frames and three tokens are enumerated; a text that needs five frames has none."""
    log_probs = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).log_softmax(1)

    def collapsed(path: tuple[int, ...]) -> list[int]:
        starts = [token for place, token in enumerate(path) if place == 0 or path[place - 1] != token]
        return [token for token in starts if token]

    texts = [[], [1], [2, 1], [1, 1], [1, 2, 1], [1, 1, 1]]
    found = log_likelihoods(log_probs, texts)
    paths = [(collapsed(path), float(log_probs[range(4), path].sum())) for path in product(range(3), repeat=4)]
    for text, value in zip(texts, found, strict=True):
        likelihood = sum(math.exp(each) for tokens, each in paths if tokens == text)
        assert value == pytest.approx(math.log(likelihood) if likelihood else -math.inf, abs=1e-5)


def test_a_limit_follows_the_scores_of_the_set_and_a_tenth_of_wrong_ones_does_not_move_it() -> None:
    """The limit is at least `misfit`; transcripts without any path do not count."""
    scores = np.linspace(0, 1, 101).tolist()
    config = CheckConfig(outlier=2, misfit=0.5)
    assert usual_limit(scores, config) == pytest.approx(0.5 + 2 * 0.4)
    assert usual_limit([*scores, math.inf], config) == pytest.approx(0.5 + 2 * 0.4)
    assert usual_limit([0.0] * 90 + [50.0] * 9, config) == 0.5
    assert usual_limit([], config) == 0.5


@pytest.mark.wide
def test_swapped_and_wrong_transcripts_are_found_and_nothing_else(planted: list[Record], good: Recogniser) -> None:
    """Each swapped transcript is listed with its partner; every finding has the text, what was heard, and the score."""
    whole, findings = _hear(planted, good)
    assert {each.id: each.other_id for each in findings if each.kind == "swapped"} == _partners()
    assert [each.id for each in findings if each.kind == "misfit"] == ["song-50"]
    first = next(each for each in findings if each.id == "song-3")
    assert first.detail.startswith(f"{planted[3].text!r}, heard {planted[40].text!r}, ")
    assert first.detail.endswith(f"; fits {planted[40].text!r}")
    assert first.value is not None and first.value > whole.limit == first.limit
    assert {each.id for each in whole.heard[:7]} == {*_partners(), "song-50"}


@pytest.mark.wide
def test_a_poor_recogniser_finds_the_swapped_ones_too(planted: list[Record], poor: Recogniser) -> None:
    """It hears more than a fifth of the characters wrong."""
    whole, findings = _hear(planted, poor)
    assert whole.errors > 0.2
    assert {each.id: each.other_id for each in findings if each.kind == "swapped"} == _partners()
    assert len([each for each in findings if each.kind == "misfit"]) <= 2


@pytest.mark.wide
@pytest.mark.parametrize("which", ["good", "poor"])
def test_correct_transcripts_raise_hardly_any_alarm(
    clean: list[Record], which: str, request: pytest.FixtureRequest
) -> None:
    """At most one of 120 does, and none is called swapped."""
    _, findings = _hear(clean, request.getfixturevalue(which))
    assert len(findings) <= 1
    assert all(each.kind == "misfit" for each in findings)


@pytest.mark.wide
def test_what_the_model_cannot_spell_is_counted_and_what_has_no_path_does_not_fit(
    clean: list[Record], good: Recogniser
) -> None:
    """Neither stops the check."""
    records = [replace(clean[0], text="LA LA"), replace(clean[1], text="DO " * 200 + "DO"), *clean[2:]]
    whole, findings = _hear(records, good)
    assert [name for name, _ in whole.skipped] == ["song-0"]
    assert "'L'" in whole.skipped[0][1]
    assert [(each.kind, each.id, each.value) for each in findings] == [("misfit", "song-1", math.inf)]
    nothing, none = _hear([], good)
    assert (nothing.heard, none) == ((), [])


def test_a_few_or_equal_transcripts_are_no_obstacle(clean: list[Record], good: Recogniser) -> None:
    """With no other transcript to compare with, the distance to what is heard decides."""
    assert _hear(clean[:1], good)[1] == []
    same = [replace(clean[0], id=f"again-{number}") for number in range(11)]
    assert [each.id for each in _hear([*same, replace(clean[1], text=clean[0].text)], good)[1]] == ["song-1"]


def test_lists_name_everything_and_what_was_heard_before_is_removed(
    planted: list[Record], good: Recogniser, tmp_path: Path
) -> None:
    """`--drop` lists the findings with their reasons; a check without a model leaves no list of what was heard."""
    whole, findings = _hear(planted, good)
    report = Report("train", (SetSize("train", 120, 60.0, "digest"),), tuple(findings), (whole,))
    write_report(tmp_path, report)
    lines = (tmp_path / HEARD_LIST).read_text(encoding="utf-8").splitlines()
    assert lines[0] == "set\tid\tscore\tgap\tfit\terrors\ttext\theard"
    assert len(lines) == 121
    assert set(_partners()) <= {line.split("\t")[1] for line in lines[1:8]}
    reasons = {each.id: each.reason for each in to_drop(report, CheckConfig())}
    assert reasons["song-3"] == "swapped with song-40 in train"
    assert reasons["song-50"] == "misfit"
    write_report(tmp_path, replace(report, findings=(), heard=()))
    assert not (tmp_path / HEARD_LIST).exists()
