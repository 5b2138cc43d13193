"""The demo corpus: the same speech for the same seed, and sets with different voices."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from starling.errors import DataError
from starling.speech.corpora import CorpusConfig, SyntheticCorpus, Utterance
from starling.speech.corpora.synthetic import LANGUAGES, VOICES, add_noise
from starling.speech.espeak import Sentence, speak


def _spoken(set_name: str, **settings: object) -> list[Utterance]:
    corpus = SyntheticCorpus.model_validate({"kind": "synthetic", "sets": {"train": 30, "test": 30}, **settings})
    return list(corpus.utterances(set_name))


def test_the_same_seed_speaks_the_same_samples() -> None:
    """Two preparations agree to the bit, in any order of reading; another seed gives another corpus."""
    first, second = _spoken("train", seed=3), _spoken("train", seed=3)
    for a, b in reversed(list(zip(first, second, strict=True))):
        assert (a.id, a.speaker, a.text) == (b.id, b.speaker, b.text)
        np.testing.assert_array_equal(a.read()[0], b.read()[0])
    assert [u.text for u in _spoken("train", seed=4)] != [u.text for u in first]


def test_no_voice_speaks_in_two_sets() -> None:
    """Voices of dev and test are unseen in training."""
    for one, other in combinations(VOICES.values(), 2):
        assert not {voice.lower() for voice in one} & {voice.lower() for voice in other}
    assert {u.speaker for u in _spoken("test")} <= set(VOICES["test"])
    assert {u.speaker for u in _spoken("train")} <= set(VOICES["train"])


def test_every_voice_speaks_in_every_accent_and_the_same_in_every_process() -> None:
    """The synthesiser knows all the voices that we name; none is silent, and none is random by itself."""
    voices = [f"{accent}+{voice}" for accent in LANGUAGES["en"].accents for each in VOICES.values() for voice in each]
    sentences = [Sentence("turn left stop", voice, 160, 50, 50) for voice in voices]
    runs = [list(speak(sentences)) for _ in range(3)]
    for voice, *spoken in zip(voices, *runs, strict=True):
        samples, rate = spoken[0]
        assert rate == 22050
        assert 0.5 < len(samples) / rate < 3, voice
        assert np.abs(samples.astype(int)).max() > 1000, voice
        assert all(np.array_equal(samples, other) for other, _ in spoken), voice


def test_utterances_are_digits_and_commands_of_plausible_length() -> None:
    """Texts come from the vocabulary, in the requested shares; a word takes 0.1 to 1 second."""
    utterances = _spoken("train", sets={"train": 200}, commands=0.25, digits=(2, 4))
    commands = [u for u in utterances if u.text in LANGUAGES["en"].commands]
    assert 25 <= len(commands) <= 75
    for utterance in utterances:
        words = utterance.text.split()
        if utterance.text not in LANGUAGES["en"].commands:
            assert set(words) <= set(LANGUAGES["en"].digits)
            assert 2 <= len(words) <= 4
    for utterance in utterances[:40]:
        samples, rate = utterance.read()
        assert 0.1 < len(samples) / rate / len(utterance.text.split()) < 1
        assert np.abs(samples).max() <= 1


def test_noise_has_the_ratio_asked_for() -> None:
    """The mixture is the scaled speech plus noise at the given signal-to-noise ratio."""
    speech = np.sin(np.arange(20000) / 5).astype(np.float32)
    mixture = add_noise(speech, np.random.default_rng(1), (20.0, 20.0))
    scale = float(np.dot(mixture, speech) / np.dot(speech, speech))
    noise = mixture - scale * speech
    assert 20 * np.log10(scale * np.std(speech) / np.std(noise)) == pytest.approx(20, abs=0.3)


def test_an_unknown_voice_is_a_data_error() -> None:
    """The synthesiser's refusal is passed on with the name."""
    with pytest.raises(DataError, match="no voice 'xx'"):
        list(speak([Sentence("stop", "xx", 160, 50, 50)]))


def test_without_the_synthesiser_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing espeakng-loader is one clear message."""
    (tmp_path / "espeakng_loader.py").write_text("raise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(DataError, match=r"pip install 'starling-asr\[demo\]'"):
        _spoken("train")


@pytest.mark.parametrize(
    "settings", [{"sets": {"training": 5}}, {"sets": {}}, {"sets": {"train": 0}}, {"commands": 2}, {"digits": (5, 2)}]
)
def test_impossible_settings_are_refused(settings: dict[str, object]) -> None:
    """Sets are train, dev and test, of at least one utterance; ranges are in order."""
    with pytest.raises(ValidationError):
        TypeAdapter(CorpusConfig).validate_python({"kind": "synthetic", "sets": {"train": 5}, **settings})
