"""Log-mel features against an independent implementation, and their guarantees."""

import kaldi_native_fbank
import numpy as np
import pytest
import torch
from lhotse.features.kaldi.layers import Wav2LogFilterBank
from tones import song_set

from starling.errors import DataError
from starling.speech.features import FeatureConfig, LogMel, Warp, mel_bank
from starling.speech.resampling import resampled


def noise(seconds: float, rate: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(0.1 * np.random.default_rng(seed).standard_normal(int(seconds * rate)).astype(np.float32))


def kaldi_log_mel(waveform: torch.Tensor, rate: int, num_mels: int) -> np.ndarray:
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.samp_freq = rate
    options.frame_opts.dither = 0
    options.frame_opts.snip_edges = False
    options.mel_opts.num_bins = num_mels
    options.mel_opts.low_freq = 20
    options.mel_opts.high_freq = -400
    fbank = kaldi_native_fbank.OnlineFbank(options)
    fbank.accept_waveform(rate, waveform.tolist())
    fbank.input_finished()
    return np.stack([fbank.get_frame(frame) for frame in range(fbank.num_frames_ready)])


@pytest.mark.parametrize(("rate", "num_mels"), [(8000, 40), (16000, 80)])
def test_features_are_those_of_kaldi(rate, num_mels):
    """The default bands and windows give Kaldi's numbers at 8 and at 16 kHz."""
    waveform = noise(1.234, rate)
    features = LogMel(FeatureConfig(normalise="none"), rate)(waveform)
    oracle = kaldi_log_mel(waveform, rate, num_mels)
    assert features.shape == oracle.shape
    np.testing.assert_allclose(features.numpy(), oracle, atol=2e-3)


@pytest.mark.parametrize(("rate", "num_mels"), [(8000, 40), (16000, 80)])
def test_features_are_those_of_lhotse_up_to_rounding(rate, num_mels):
    """Emphasis before framing, and FFTs that utterances share, change only the last digits."""
    oracle = Wav2LogFilterBank(rate, num_filters=num_mels, high_freq=-400.0)
    waveforms = [noise(0.025 + 0.13 * seed, rate, seed) for seed in range(12)]
    found = LogMel(FeatureConfig(normalise="none"), rate).batch(waveforms)
    for waveform, features in zip(waveforms, found, strict=True):
        torch.testing.assert_close(features, oracle(waveform[None])[0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("normalise", ["none", "utterance", "speech"])
def test_an_utterances_features_do_not_depend_on_its_neighbours(normalise):
    """The bits are the same alone and anywhere in a batch, wherever blocks of frames begin."""
    log_mel = LogMel(FeatureConfig(normalise=normalise), 8000)
    waveforms = [noise(length, 8000, seed) for seed, length in enumerate((0.025, 3.1, 0.5, 0.031, 2.56, 1.0))]
    for some in (waveforms, waveforms[::-1], waveforms[2:4]):
        for waveform, features in zip(some, log_mel.batch(some), strict=True):
            assert torch.equal(features, log_mel(waveform))


@pytest.mark.parametrize("num_samples", [200, 239, 240, 241, 1000, 8000, 12345])
def test_the_number_of_frames_is_known_without_computing_them(num_samples):
    """`num_frames` and the features agree for every length, since CTC feasibility relies on it."""
    log_mel = LogMel(FeatureConfig(), 8000)
    assert len(log_mel(noise(1.0, num_samples))) == log_mel.num_frames(num_samples)


def test_each_utterance_is_normalised_separately():
    """Every band of an utterance has mean 0 and deviation 1."""
    features = LogMel(FeatureConfig(), 8000)(noise(2.0, 8000))
    torch.testing.assert_close(features.mean(0), torch.zeros(40), atol=1e-5, rtol=0)
    torch.testing.assert_close(features.std(0, correction=0), torch.ones(40), atol=1e-5, rtol=0)


def test_digital_silence_gives_finite_features():
    """A constant band is centred, not divided by its deviation of zero."""
    for normalise in ("utterance", "speech"):
        features = LogMel(FeatureConfig(normalise=normalise), 8000)(torch.zeros(4000))
        assert torch.equal(features, torch.zeros(50, 40))


def test_pauses_do_not_shift_features_normalised_by_speech():
    """The mean of loud frames is 0, and a second of faint noise before them changes their features by less than 0.05 on
    average; with `utterance`, by more than ten times as much."""
    loud, faint = noise(1.0, 8000), 1e-3 * noise(1.0, 8000, 2)
    change = {}
    for normalise in ("utterance", "speech"):
        log_mel = LogMel(FeatureConfig(normalise=normalise), 8000)
        short, long = log_mel(torch.cat([faint[:3000], loud])), log_mel(torch.cat([faint, faint[:3000], loud]))
        change[normalise] = float((short[-95:] - long[-95:]).abs().mean())
        if normalise == "speech":
            torch.testing.assert_close(short[-95:].mean(0), torch.zeros(40), atol=0.05, rtol=0)
    assert change["speech"] < 0.05
    assert change["utterance"] > 10 * change["speech"]


def test_global_statistics_are_those_of_all_frames(tmp_path):
    """With `normalise: global` the frames of the set that was fitted have mean 0 and deviation 1."""
    songs = song_set(tmp_path / "songs", 10)
    log_mel = LogMel(FeatureConfig(normalise="global"), songs.sampling_rate)
    log_mel.fit(songs)
    frames = torch.cat([log_mel(torch.from_numpy(songs.audio(index))) for index in range(10)])
    torch.testing.assert_close(frames.mean(0), torch.zeros(40), atol=1e-4, rtol=0)
    torch.testing.assert_close(frames.std(0, correction=0), torch.ones(40), atol=1e-4, rtol=0)
    again = LogMel(log_mel.config, songs.sampling_rate)
    again.statistics = log_mel.statistics
    waveform = torch.from_numpy(songs.audio(0))
    assert torch.equal(again(waveform), log_mel(waveform))


def test_global_normalisation_without_statistics_is_refused():
    """Wrong features are never computed."""
    with pytest.raises(DataError, match=r"LogMel\.fit"):
        LogMel(FeatureConfig(normalise="global"), 8000)(noise(1.0, 8000))


@pytest.mark.parametrize(
    ("waveform", "message"),
    [
        (torch.zeros(0), r"'u7' has 0 samples .* needs 200"),
        (torch.zeros(199), r"'u7' has 199 samples \(0.025 s\).* needs 200"),
        (torch.full((400,), float("nan")), r"'u7' contains samples that are not finite"),
        (torch.zeros(2, 400), r"'u7' has shape \[2, 400\]"),
    ],
)
def test_audio_without_features_is_refused_by_name(waveform, message):
    """Empty, tiny, non-finite or many-channel audio is a DataError with the id and the numbers."""
    with pytest.raises(DataError, match=message):
        LogMel(FeatureConfig(), 8000)(waveform, "u7")


def test_resampling_keeps_a_tone_in_place():
    """A 1 kHz tone is a 1 kHz tone at the other rate."""
    tone = torch.sin(2 * torch.pi * 1000 * torch.arange(16000) / 16000)
    low = resampled(tone[None], 16000, 8000)[0]
    expected = torch.sin(2 * torch.pi * 1000 * torch.arange(8000) / 8000)
    torch.testing.assert_close(low[100:-100], expected[100:-100], atol=1e-2, rtol=0)


@pytest.mark.parametrize(("rate", "num_mels"), [(8000, 40), (16000, 80)])
def test_the_mel_bank_is_that_of_lhotse_and_a_warped_one_moves_tones(rate, num_mels):
    """Without warping, the bits are the same. With a factor, a tone is heard where a tone of that many times its
    frequency would be; near the Nyquist frequency it does not move."""
    log_mel = LogMel(FeatureConfig(normalise="none"), rate)
    layer = Wav2LogFilterBank(rate, num_filters=num_mels, high_freq=-400.0)
    plain = mel_bank(num_mels, layer.fft_length, rate, 20.0, -400.0)
    assert torch.equal(plain, layer._fb)

    def loudest(frequency: float, warp: float) -> float:
        waveform = torch.sin(2 * torch.pi * frequency * torch.arange(rate) / rate)
        energies = log_mel.bands([waveform], [Warp(1.0, warp)])[0].mean(0).exp()
        return float((energies * torch.arange(num_mels)).sum() / energies.sum())

    for warp in (0.8, 0.93, 1.1, 1.25):
        for frequency in (400.0, 1000.0, 2000.0):
            assert loudest(frequency, warp) == pytest.approx(loudest(warp * frequency, 1.0), abs=0.25)
        assert mel_bank(num_mels, layer.fft_length, rate, 20.0, 0.0, warp)[-2].argmax() == num_mels - 1


def test_a_tempo_changes_the_number_of_frames_and_not_the_spectrum():
    """Twice the tempo gives every second frame: the same numbers as with twice the frame shift."""
    waveform = noise(2.0, 8000)
    log_mel = LogMel(FeatureConfig(normalise="none"), 8000)
    (fast,) = log_mel.bands([waveform], [Warp(tempo=1.5)])
    (oracle,) = LogMel(FeatureConfig(normalise="none", frame_shift=0.015), 8000).bands([waveform])
    assert len(fast) == log_mel.num_frames(len(waveform), 1.5) == len(oracle)
    torch.testing.assert_close(fast, oracle)


def test_an_unwarped_utterance_has_the_features_of_one_without_warp():
    """They are equal to the bit, so that factors of 1 are not a special case."""
    waveforms = [noise(length, 8000) for length in (0.025, 0.5, 3.1)]
    log_mel = LogMel(FeatureConfig(), 8000)
    for plain, warped in zip(log_mel.batch(waveforms), log_mel.batch(waveforms, [Warp()] * 3), strict=True):
        assert torch.equal(plain, warped)
