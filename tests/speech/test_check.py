"""`starling check`: everything planted is found, nothing else is, and dropped utterances are left out."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import planted as plants
import pytest
from planted import PLANTS, RATE, Expected, Planted, sentence, voice
from pydantic import ValidationError

from starling.errors import DataError
from starling.speech.audio import Audio
from starling.speech.check.corpus import Training, check_corpus, near_texts, num_bands, pieces, similarity
from starling.speech.check.findings import HEARD, KINDS, CheckConfig, Report, seen_in_training, to_drop, write_report
from starling.speech.check.recordings import ENVELOPE_LENGTH, likeness, measure, prepared_sources
from starling.speech.commands.check import sources_of
from starling.speech.corpora import Utterance
from starling.speech.data import DataConfig, set_digest
from starling.speech.prepare import prepare
from starling.speech.store import SpeechSet
from starling.speech.usable import Checking, FilterConfig, LeftOut, Source, read_left_out, write_left_out


def _report(data: DataConfig, train: str = "train") -> Report:
    return check_corpus(sources_of(data), train, data.check, Training(), lambda name, done, total: None)


def _found(report: Report) -> Expected:
    keys = [(each.kind, each.set, each.id) for each in report.findings]
    assert len(keys) == len(set(keys)), "a finding is told once"
    return set(keys)


def test_nothing_is_found_in_a_clean_corpus(tmp_path: Path) -> None:
    """Distinct sentences, voices and speakers are not faults."""
    report = _report(Planted(tmp_path / "corpus").config(tmp_path / "data"))
    assert report.findings == ()
    assert [(each.name, each.utterances) for each in report.sets] == [("train", 24), ("test", 8)]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_exactly_the_planted_faults_are_found(tmp_path: Path, plant: Callable[[Planted], None]) -> None:
    """Each plant is tested alone, so that none hides behind another."""
    corpus = Planted(tmp_path / "corpus")
    plant(corpus)
    assert _found(_report(corpus.config(tmp_path / "data"))) == corpus.expected


def test_everything_planted_at_once_is_found_and_nothing_else(tmp_path: Path) -> None:
    """Findings do not disturb each other, either in a recipe's corpus or in sets prepared from it."""
    corpus = Planted(tmp_path / "corpus")
    for plant in PLANTS:
        plant(corpus)
    data = corpus.config(tmp_path / "data", filter={"on_bad": "skip", "max_skipped": 0.5})
    assert _found(_report(data)) == corpus.expected

    prepare(data)
    sources = prepared_sources(tmp_path / "data", ["train", "test"])
    found = _found(check_corpus(sources, "train", CheckConfig(), Training(), lambda name, done, total: None))
    gone = {each for each in corpus.expected if each[0] in ("unreadable", "unusable") or each[2] == "zeros"}
    assert found == corpus.expected - gone


def test_a_finding_names_the_other_utterance_and_its_numbers(tmp_path: Path) -> None:
    """The finding tells the similar utterance, the measured value, and the limit."""
    corpus = Planted(tmp_path / "corpus")
    plants.the_same_recording_as_vorbis(corpus)
    plants.silence(corpus)
    found = {(each.kind, each.id): each for each in _report(corpus.config(tmp_path / "data")).findings}
    copy = found["same-text-and-length", "vorbis"]
    assert (copy.other_set, copy.other_id, copy.limit) == ("train", "train-3", 0.95)
    assert copy.value is not None
    assert 0.95 <= copy.value <= 1
    quiet = found["silence", "quiet"]
    assert (quiet.other_id, quiet.limit, quiet.value) == ("", -60.0, pytest.approx(-70.5, abs=0.5))
    assert found["silence", "zeros"].value == float("-inf")


@pytest.mark.parametrize("limit", [{"silence_db": -80.0}, {"kinds": ["clipping", "near-text"]}])
def test_limits_and_kinds_are_the_users_choice(tmp_path: Path, limit: dict[str, object]) -> None:
    """A lower limit for silence, or not looking for silence, finds no quiet utterance."""
    corpus = Planted(tmp_path / "corpus")
    plants.silence(corpus)
    found = _found(_report(corpus.config(tmp_path / "data", check=limit)))
    assert ("silence", "train", "quiet") not in found


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    """A reversed range, an unknown kind, and dropping speakers by utterances are refused."""
    corpus = Planted(tmp_path / "corpus", 1, 1)
    for wrong in ({"seconds_per_character": [1, 0.1]}, {"kinds": ["noise"]}, {"drop": ["overlap-speaker"]}):
        with pytest.raises(ValidationError):
            corpus.config(tmp_path / "data", check=wrong)


def test_strings_are_compared_as_they_are_trained_on(tmp_path: Path) -> None:
    """Isolated words naturally share texts: texts are compared as strings, audio as recordings."""
    corpus = Planted(tmp_path / "corpus", 0, 0)
    for i in range(40):
        corpus.add(f"r{i}", "train" if i < 30 else "test", text=plants.WORDS[i % 10], speaker=f"s{i // 30}")
    corpus.add("copy", "train", audio="r3.wav", text=plants.WORDS[3], speaker="s0")
    data = corpus.config(tmp_path / "data", strings={"shortest": 4, "longest": 6})
    report = _report(data)
    assert {each for each in _found(report) if "text" not in each[0]} == {("same-audio", "train", "copy")}
    prepare(data)
    names = {
        (name, speech_set.id(i))
        for name in ("train", "test")
        for speech_set in [SpeechSet.open(tmp_path / "data" / name)]
        for i in range(len(speech_set))
    }
    near = _report(data.model_copy(update={"check": CheckConfig(similarity=0.5)}))
    assert {(each.set, each.id) for each in near.findings if "text" in each.kind} <= names


def test_preparation_leaves_out_counts_and_lists_dropped_utterances(tmp_path: Path) -> None:
    """The first of duplicates stays, the training side of overlaps is dropped, and the test set stays whole."""
    corpus = Planted(tmp_path / "corpus")
    for plant in PLANTS:
        plant(corpus)
    data = corpus.config(tmp_path / "data", filter={"on_bad": "skip", "max_skipped": 0.5})
    items = to_drop(_report(data), data.check)
    gone = {item.id for item in items}
    assert gone == {
        "again", "second", "third", "vorbis", "leaked", "mp3", "quiet", "zeros", "fast", "slow", "bytes", "half",
        "missing", "nan",
    }  # fmt: skip
    assert {item.set for item in items} == {"train"}

    listed = tmp_path / "list.tsv"
    write_left_out(listed, items)
    assert read_left_out(listed) == items
    data = data.model_copy(update={"filter": data.filter.model_copy(update={"leave_out": listed})})
    train, test = prepare(data).sets
    speech_set = SpeechSet.open(tmp_path / "data" / "train")
    assert gone.isdisjoint(speech_set.id(i) for i in range(len(speech_set)))
    assert (train.dropped, test.dropped) == (len(gone) + 2, 0)  # and the two that are unusable
    dropped = (tmp_path / "data" / "train" / "dropped.tsv").read_text(encoding="utf-8")
    assert "leaked\t" in dropped
    assert "left out: overlap-audio of test-1 in test" in dropped
    left = {kind for kind, _, _ in _found(_report(data))}
    assert left == {
        "unusable", "clipping", "too-short", "seconds-per-character", "near-text", "overlap-text",
        "overlap-near-text", "overlap-speaker",
    }  # fmt: skip


def test_held_out_sets_lose_utterances_only_on_request_and_never_for_an_overlap(tmp_path: Path) -> None:
    """`drop_from: all` drops their faults; the test side of an overlap stays."""
    corpus = Planted(tmp_path / "corpus")
    for plant in (plants.seconds_per_character, plants.audio_in_training, plants.text_in_training):
        plant(corpus)
    check = CheckConfig(drop=("seconds-per-character", "overlap-audio", "overlap-text"), drop_from="all")
    items = to_drop(_report(corpus.config(tmp_path / "data")), check)
    assert {(item.set, item.id) for item in items} == {
        ("train", "slow"), ("test", "long"), ("train", "leaked"), ("train", "said"),
    }  # fmt: skip


def test_an_id_that_two_utterances_share_is_not_dropped(tmp_path: Path) -> None:
    """Leaving it out would leave out the good one too."""
    corpus = Planted(tmp_path / "corpus")
    plants.an_empty_transcript(corpus)
    items = to_drop(_report(corpus.config(tmp_path / "data")), CheckConfig(drop=("unusable",)))
    assert [item.id for item in items] == ["mute"]


def test_a_list_of_what_is_left_out_changes_only_the_sets_that_it_names(tmp_path: Path) -> None:
    """Without a list, and for other sets, nothing is prepared again; the place of the list does not matter."""
    corpus = Planted(tmp_path / "corpus", 3, 3)
    data = corpus.config(tmp_path / "data")
    digests = []
    for name in ("a.tsv", "b.tsv"):
        write_left_out(tmp_path / name, [LeftOut("train", "train-1", 1.5, "why")])
        with_list = corpus.config(tmp_path / "data", filter={"leave_out": tmp_path / name})
        digests.append(set_digest(with_list, "train"))
        assert set_digest(with_list, "test") == set_digest(data, "test")
    assert digests[0] == digests[1] != set_digest(data, "train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("id\treason\n", "expected the columns set, id, seconds, reason, found id, reason"),
        ("set\tid\tseconds\treason\ntrain\tu\tlong\tx\n", "'long' is not a number of seconds"),
        ("set\tid\tseconds\treason\ntrain\tu\n", ":2: 2 columns, the header has 4"),
    ],
)
def test_an_invalid_list_is_refused_by_name(tmp_path: Path, content: str | None, message: str) -> None:
    """Nothing is prepared with half a list."""
    path = tmp_path / "list.tsv"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    data = Planted(tmp_path / "corpus", 2, 2).config(tmp_path / "data", filter={"leave_out": path})
    with pytest.raises(DataError, match=r"data\.filter\.leave_out: .*list\.tsv") as caught:
        prepare(data)
    assert message in str(caught.value)


def test_test_utterances_seen_in_training_are_reported_for_the_checked_data(tmp_path: Path) -> None:
    """Near-duplicates count by audio, text and near text; without a check there are none, and changed data are an
    error."""
    corpus = Planted(tmp_path / "corpus")
    for plant in PLANTS:
        plant(corpus)
    data = corpus.config(tmp_path / "data", filter={"on_bad": "skip", "max_skipped": 0.5})
    digests = set_digest(data, "train"), set_digest(data, "test")
    assert seen_in_training(data.folder, "train", "test", digests) is None
    write_report(data.folder, _report(data))
    assert seen_in_training(data.folder, "train", "test", digests) == {"test-1", "test-2", "test-3", "test-4"}
    assert seen_in_training(data.folder, "train", "train", digests) is None
    assert seen_in_training(data.folder, "test", "train", digests) is None
    with pytest.raises(DataError, match=r"check\.tsv was made for other data; run `starling check` again"):
        seen_in_training(data.folder, "train", "test", (digests[0], "other"))


def test_similarity_is_that_of_multisets_and_every_near_text_is_found() -> None:
    """All pairs are counted one by one as an oracle, among strings of few words, where nearly all texts are alike."""
    random = np.random.default_rng(3)
    texts = sorted(
        {" ".join(random.choice(["ONE", "TWO", "THREE", "SEVEN"], random.integers(1, 8))) for _ in range(200)}
    )

    def counted(text: str) -> Counter[str]:
        padded = f" {text} "
        return Counter(padded[i : i + 4] for i in range(max(1, len(padded) - 3)))

    bags = [counted(text) for text in texts]
    for threshold in (0.6, 0.8):
        expected = []
        for i, own in enumerate(bags):
            both = [((own & other).total(), (own | other).total()) for other in bags]
            expected.append({j: a / b for j, (a, b) in enumerate(both) if j != i and a / b >= threshold})
        assert [dict(near) for near in near_texts(texts, threshold, 4, lambda done, total: None)] == expected
        assert sum(map(len, expected)) > 10
    assert similarity(pieces("ONE", 4), pieces("ONE ONE ONE", 4)) < 0.5


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_of_hashes_miss_hardly_any_near_text(threshold: float) -> None:
    """At most one near text in 10,000 is missed, with as few candidates as that allows."""
    bands = num_bands(threshold)
    rows = 120 // bands
    assert bands * rows == 120
    assert (1 - threshold**rows) ** bands <= 1e-4


def test_waveforms_are_alike_whatever_their_loudness_polarity_rate_and_a_small_shift() -> None:
    """Beyond the shift, or in a different take, waveforms are not alike."""
    one = voice(1, 2.0)
    assert likeness((one, RATE), (-0.3 * one, RATE), 0.0) == pytest.approx(1.0, abs=1e-4)
    assert likeness((one, RATE), (one[40:], RATE), 0.01) > 0.97
    assert likeness((one[40:], RATE), (one, RATE), 0.01) > 0.97
    assert likeness((one, RATE), (one[400:], RATE), 0.01) < 0.8
    assert likeness((one, RATE), (voice(2, 2.0), RATE), 0.01) < 0.5
    twice = np.repeat(one, 2)
    assert likeness((one, RATE), (twice, 2 * RATE), 0.01) > 0.97
    assert likeness((one, RATE), (0 * one, RATE), 0.01) == 0.0


def test_the_digest_of_audio_is_that_of_its_16_bit_samples_and_rate() -> None:
    """Differences that 16 bits cannot represent do not change it."""
    one = np.round(voice(1, 0.5) * 32768) / 32768
    digest = measure(one.astype(np.float32), RATE).digest
    assert measure((one + 1e-6).astype(np.float32), RATE).digest == digest
    assert measure((one + 1e-4).astype(np.float32), RATE).digest != digest
    assert measure(one.astype(np.float32), 2 * RATE).digest != digest
    assert len(measure(one[:5].astype(np.float32), RATE).envelope) == ENVELOPE_LENGTH


def _source(texts: list[str], reads: Counter[str]) -> Source:
    """A source of utterances of one second; every tenth copies the one before it, louder, with its text."""

    def utterance(i: int) -> Utterance:
        original = i - (i % 10 == 9)
        samples = voice(original, 1.0) * np.float32(1.2 if i != original else 1.0)

        def read() -> Audio:
            reads[f"u{i}"] += 1
            return samples, RATE

        return Utterance(f"u{i}", "s", texts[original], "nowhere", read)

    utterances = [utterance(i) for i in range(len(texts))]
    return Source(Checking("train", RATE, "upper", FilterConfig(on_bad="skip")), lambda: utterances)


@pytest.mark.wide
def test_two_thousand_utterances_take_seconds_and_each_is_read_once() -> None:
    """Only candidates for the same recording are read again; time grows with the number of utterances, not of their
    pairs."""
    reads: Counter[str] = Counter()
    source = _source([f"{sentence(i)[:14]} {i}" for i in range(2000)], reads)
    start = time.process_time()
    report = check_corpus([source], "train", CheckConfig(), Training(), lambda name, done, total: None)
    assert time.process_time() - start < 60
    copies = {each.id for each in report.findings if each.kind == "same-text-and-length"}
    assert copies == {f"u{i}" for i in range(9, 2000, 10)}
    again = {name for name, times in reads.items() if times > 1}
    assert again == copies | {f"u{i}" for i in range(8, 2000, 10)}
    assert max(reads.values()) == 2


def test_many_takes_of_one_text_are_compared_in_bounded_time() -> None:
    """400 takes of one text and length make 79,800 pairs, of which few are compared."""
    reads: Counter[str] = Counter()
    source = _source(["yes"] * 400, reads)
    config = CheckConfig(kinds=("same-audio", "same-text-and-length"))
    report = check_corpus([source], "train", config, Training(), lambda name, done, total: None)
    assert {each.id for each in report.findings} == {f"u{i}" for i in range(9, 400, 10)}
    assert reads.total() <= 400 * (1 + 1 + 5)


def test_progress_is_reported_for_audio_and_texts(tmp_path: Path) -> None:
    """Each is reported by name, up to the end."""
    told: dict[str, tuple[int, int]] = {}
    sources = sources_of(Planted(tmp_path / "corpus").config(tmp_path / "data"))
    check_corpus(
        sources, "train", CheckConfig(), Training(), lambda name, done, total: told.update({name: (done, total)})
    )
    assert told == {
        "train (checking)": (24, 24), "test (checking)": (8, 8), "audio": (32, 32), "texts": (32, 32),
    }  # fmt: skip


def test_every_kind_of_finding_is_planted(tmp_path: Path) -> None:
    """No kind goes untested."""
    corpus = Planted(tmp_path / "corpus")
    for plant in PLANTS:
        plant(corpus)
    assert {kind for kind, _, _ in corpus.expected} == set(KINDS) - set(
        HEARD
    )  # those are planted in test_transcripts.py
