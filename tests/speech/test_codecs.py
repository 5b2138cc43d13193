"""Codecs: what they keep and what they lose, always with the same length and timing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from corpus_builders import write_table
from numpy.typing import NDArray
from pydantic import ValidationError
from scipy.signal import sosfilt

from starling.errors import DataError
from starling.speech.augmentation import (
    AugmentConfig,
    _band_filter,
    augment_waveform,
    check_codec,
    label_of,
    set_of,
    transmitted,
)
from starling.speech.data import DataConfig
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import model_config
from starling.speech.prepare import prepare
from starling.speech.recogniser import Recogniser
from starling.speech.store import SpeechSet
from starling.speech.tokens import CharacterTokenizer

EVERY = ("telephone", "gsm", "rate-4000", "opus-6", "opus-48", "mp3-8", "mp3-64")


def tone(frequency: float, rate: int, seconds: float = 1.0) -> NDArray[np.float32]:
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def speech_like(rate: int, seconds: float = 1.5) -> NDArray[np.float32]:
    """Noise between 300 and 900 Hz that swells four times a second, [T]."""
    generator = np.random.default_rng(0)
    count = round(seconds * rate)
    spectrum = np.fft.rfft(generator.standard_normal(count))
    frequencies = np.fft.rfftfreq(count, 1 / rate)
    spectrum[(frequencies < 300) | (frequencies > 900)] = 0
    wave = np.fft.irfft(spectrum, count) * (0.6 + 0.4 * np.sin(2 * np.pi * 4 * np.arange(count) / rate))
    return (0.6 * wave / np.abs(wave).max()).astype(np.float32)


def decibels(received: NDArray[np.float32], sent: NDArray[np.float32]) -> float:
    """The power of the received audio relative to what was sent."""
    return 10 * float(np.log10(np.mean(np.square(received)) / np.mean(np.square(sent))))


def g711(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """µ-law as ITU-T G.711 defines it: 14-bit samples, eight segments of sixteen steps each, naively."""
    result = []
    for sample in samples:
        magnitude = min(round(abs(float(sample)) * 32767 / 4) + 33, 8191)
        segment = max(0, magnitude.bit_length() - 6)
        step = (magnitude >> (segment + 1)) & 15
        level = ((2 * step + 33) << segment) - 33
        result.append(float(np.sign(sample)) * level * 4 / 32768)
    return np.asarray(result, np.float32)


def test_the_telephone_is_a_band_filter_and_mu_law() -> None:
    """It is compared with a naive µ-law coder; they may differ by one step where a sample lies on the edge of two."""
    sent = speech_like(8000, 0.25)
    filtered = np.asarray(sosfilt(_band_filter(), sent), np.float32)
    expected = g711(filtered)
    received = transmitted(sent, 8000, "telephone")
    step = np.maximum(np.abs(filtered) / 16, 2 / 8192)
    assert np.all(np.abs(received - expected) <= step)
    assert np.mean(np.abs(received - expected) < 1e-6) > 0.97


@pytest.mark.parametrize("codec", ["telephone", "gsm"])
def test_the_telephone_keeps_its_band_only(codec: str) -> None:
    """1 kHz passes, 60 Hz and 3.9 kHz do not, and 6 kHz exceeds what 8000 samples per second can represent."""
    assert abs(decibels(transmitted(tone(1000, 16000), 16000, codec), tone(1000, 16000))) < 1.5
    for frequency in (60, 3900, 6000):
        assert decibels(transmitted(tone(frequency, 16000), 16000, codec), tone(frequency, 16000)) < -12


def test_a_lower_sampling_rate_keeps_what_is_below_half_of_it() -> None:
    """Audio sampled at a lower rate is not changed at all."""
    assert abs(decibels(transmitted(tone(1000, 16000), 16000, "rate-4000"), tone(1000, 16000))) < 0.5
    assert decibels(transmitted(tone(3000, 16000), 16000, "rate-4000"), tone(3000, 16000)) < -25
    np.testing.assert_array_equal(transmitted(tone(3000, 8000), 8000, "rate-16000"), tone(3000, 8000))


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
@pytest.mark.parametrize("codec", EVERY)
def test_codecs_keep_length_and_time(codec: str, rate: int) -> None:
    """The received audio resembles the original, and most without a shift; repeating it gives the same."""
    sent = speech_like(rate)
    received = transmitted(sent, rate, codec)
    assert received.shape == sent.shape and received.dtype == np.float32
    np.testing.assert_array_equal(transmitted(sent, rate, codec), received)
    spectrum = np.fft.rfft(received, 2 * len(sent)) * np.conj(np.fft.rfft(sent, 2 * len(sent)))
    shift = int(np.argmax(np.fft.irfft(spectrum)))
    assert min(shift, 2 * len(sent) - shift) <= rate * 0.002  # 2 ms; filters and predictors delay a little
    assert np.corrcoef(np.roll(sent, shift), received)[0, 1] > 0.6


@pytest.mark.parametrize("kind", ["opus", "mp3"])
def test_more_bits_lose_less(kind: str) -> None:
    """The error falls as the bit rate rises."""
    sent = speech_like(16000)
    errors = [decibels(transmitted(sent, 16000, f"{kind}-{kbits}") - sent, sent) for kbits in (8, 24, 64)]
    assert errors == sorted(errors, reverse=True) and errors[0] > errors[-1] + 6


def test_odd_audio_goes_through_every_codec() -> None:
    """Silence, ten milliseconds, a single sample, and far too loud audio are tested."""
    for codec in EVERY:
        assert np.abs(transmitted(np.zeros(4000, np.float32), 8000, codec)).max() < 0.01
        for length in (1, 80):
            assert len(transmitted(speech_like(8000)[:length], 8000, codec)) == length
        assert np.abs(transmitted(3 * speech_like(8000), 8000, codec)).max() < 2


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("telefone", "known are telephone, gsm, rate-HZ"),
        ("opus", "not a codec"),
        ("opus-2", "6 to 256 kbit/s"),
        ("mp3-320", "8 to 64 kbit/s"),
        ("rate-10", "1000 to 192000 Hz"),
        ("opus-8 ", "not a codec"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(name: str, problem: str) -> None:
    """This holds in a recipe, and where a codec is asked for."""
    with pytest.raises(ValueError, match=problem):
        check_codec(name)
    with pytest.raises(ValidationError, match=problem):
        AugmentConfig(codecs=(name,))


def augmented(config: AugmentConfig, seed: int) -> torch.Tensor:
    return augment_waveform(torch.from_numpy(speech_like(8000, 0.3)), 8000, config, np.random.default_rng(seed))


def test_augmentation_sends_a_share_of_the_utterances_through_one_of_the_codecs() -> None:
    """Each codec has its turn, the rest is unchanged, all according to the seed; without codecs nothing differs from
    before."""
    config = AugmentConfig(speed=(1.0,), codecs=("telephone", "rate-4000"), codec_probability=0.5)
    clean = augmented(AugmentConfig.none(), 0)
    found = [augmented(config, seed) for seed in range(60)]
    through = [np.asarray(transmitted(clean.numpy(), 8000, codec)) for codec in config.codecs]
    counts = [sum(np.array_equal(each.numpy(), one) for each in found) for one in (clean.numpy(), *through)]
    assert sum(counts) == 60 and all(count >= low for count, low in zip(counts, (18, 6, 6), strict=True))
    assert torch.equal(augmented(config, 7), found[7])
    noisy = AugmentConfig(noise_snr=(10, 20))
    assert torch.equal(augmented(noisy, 3), augmented(noisy.model_copy(update={"codec_probability": 1.0}), 3))


def test_a_set_can_be_heard_through_a_codec(tmp_path: Path) -> None:
    """The recogniser hears each utterance after the codec, and unreadable audio stays an error."""
    table = write_table(tmp_path, count=6)
    corpus = {"kind": "tsv", "path": table, "sets": {"train": {}}}
    config = DataConfig(folder=tmp_path / "sets", corpus=corpus, sampling_rate=8000, valid=None, test=())
    prepare(config)
    stored = SpeechSet.open(config.set_folder("train"))
    model = model_config(preset="tiny")
    recogniser = Recogniser.create(model, LogMel(FeatureConfig(), 8000), CharacterTokenizer("ab"), 0)
    found = dict.fromkeys(range(6), "")
    for names, heard in recogniser.heard(stored, codec="telephone"):
        for name, log_probs, length in zip(names, heard.log_probs, heard.lengths.tolist(), strict=True):
            index = next(each for each in found if stored.id(each) == name)
            waveform = recogniser.waveform(transmitted(stored.audio(index), 8000, "telephone"), 8000)
            alone = recogniser.listen([waveform]).log_probs[0]
            torch.testing.assert_close(log_probs[:length], alone, atol=1e-4, rtol=1e-4)
            plain = recogniser.listen([recogniser.waveform(stored.audio(index), 8000)]).log_probs[0]
            assert not torch.allclose(alone, plain, atol=1e-4)
            found[index] = name
    assert all(found.values())

    shard = next(stored.folder.glob("shar/*.tar"))
    content = bytearray(shard.read_bytes())
    content[600:700] = bytes(100)  # in the first recording, behind its header in the tar
    shard.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        list(recogniser.heard(SpeechSet.open(stored.folder), codec="telephone"))


def test_labels_lead_back_to_their_sets() -> None:
    """This holds even if a set's own name has an @."""
    assert set_of(label_of("test", "opus-8")) == set_of(label_of("test", None)) == "test"
    assert set_of("calls@home") == "calls@home"
    assert set_of(label_of("calls@home", "gsm")) == "calls@home"
