"""A recogniser learns, is saved whole or refused by name, and accepts common kinds of audio."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from planned import epoch_of, planner_of
from safetensors.torch import load_file, save_file
from tones import sing, song_set

from starling.chance import derive_seed
from starling.errors import CheckpointError, DataError
from starling.speech.augmentation import AugmentConfig, SpecAugmentConfig
from starling.speech.batch_plan import BatchConfig
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import model_config
from starling.speech.recogniser import Recogniser
from starling.speech.scoring import error_rates
from starling.speech.store import SpeechSet
from starling.speech.tokens import TokenConfig, make_tokenizer
from starling.speech.training.workload import load_batch, speech_loss

AUGMENT = AugmentConfig(spec_augment=SpecAugmentConfig(frequency_mask_size=4, num_time_masks=1, time_mask_size=5))


@pytest.fixture(scope="module")
def songs(tmp_path_factory) -> SpeechSet:
    return song_set(tmp_path_factory.mktemp("songs") / "train", 120)


@pytest.fixture(scope="module")
def trained(songs) -> Recogniser:
    """A tiny recogniser after a few seconds of plain training."""
    tokenizer = make_tokenizer(TokenConfig(), [songs.text(index) for index in range(len(songs))])
    features = LogMel(FeatureConfig(normalise="global"), songs.sampling_rate)
    features.fit(songs)
    recogniser = Recogniser.create(model_config(preset="tiny"), features, tokenizer, seed=1)
    optimizer = torch.optim.Adam(recogniser.model.parameters(), lr=1e-2)
    planner = planner_of(songs.durations, np.zeros(len(songs), np.int32), BatchConfig(max_duration=15), seed=1)
    for epoch in range(18):
        for number, mini in enumerate(epoch_of(planner, epoch)):
            batch = load_batch(songs, mini[0], features, AUGMENT, tokenizer, derive_seed(1, "batch", epoch, number))
            optimizer.zero_grad()
            speech_loss(recogniser.model, batch, model_config()).backward()
            torch.nn.utils.clip_grad_norm_(recogniser.model.parameters(), 5.0)
            optimizer.step()
    return recogniser


@pytest.fixture
def saved(trained, tmp_path) -> Path:
    trained.save(tmp_path / "recogniser")
    return tmp_path / "recogniser"


@pytest.mark.wide
def test_the_whole_chain_learns_a_language(trained, tmp_path):
    """Store, features, augmentation, plan, loss, network and decoding work together: unseen songs have a WER <= 5 %."""
    unseen = song_set(tmp_path / "test", 40, seed=99)
    done = []
    hypotheses = trained.recognise(unseen, max_duration=10, progress=lambda *counts: done.append(counts))
    result = error_rates({unseen.id(index): unseen.text(index) for index in range(40)}, hypotheses)
    assert result.missing == ()
    assert result.wer <= 5
    assert done[-1] == (40, 40)


@pytest.mark.wide
def test_the_size_of_a_decoding_batch_changes_no_text(trained, songs):
    """Utterances are recognised the same one by one and all together."""
    assert trained.recognise(songs, max_duration=0.1) == trained.recognise(songs, max_duration=1000)


def test_a_saved_recogniser_recognises_the_same(trained, saved, songs):
    """Weights, tokens and global statistics come back to the bit, from safetensors and JSON only."""
    again = Recogniser.load(saved)
    assert {path.name for path in saved.iterdir()} == {"config.json", "model.safetensors", "tokens.json"}
    for name, value in trained.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)
    assert again.model_config == trained.model_config
    assert again.recognise(songs) == trained.recognise(songs)


def test_audio_of_another_rate_and_of_many_channels_is_understood(trained):
    """16 kHz, stereo, doubles, 16-bit integers and tensors all give the text of 8 kHz mono."""
    generator = np.random.default_rng(5)
    words = ["MI", "DO", "FA"]
    plain = sing(words, generator)
    wide = sing(words, generator, rate=16000)
    forms = [
        (plain, 8000),
        (wide, 16000),
        (np.stack([wide, wide]), 16000),
        (plain.astype(np.float64), 8000),
        ((plain * 32767).astype(np.int16), 8000),
        (torch.from_numpy(plain), 8000),
    ]
    assert [trained.transcribe(waveform, rate) for waveform, rate in forms] == ["MI DO FA"] * len(forms)


@pytest.mark.parametrize(
    ("waveform", "rate", "message"),
    [
        (np.zeros(0, np.float32), 8000, r"shape \[0\]"),
        (np.zeros((2, 0), np.float32), 8000, r"shape \[2, 0\]"),
        (np.zeros((1, 2, 8000), np.float32), 8000, r"shape \[1, 2, 8000\]"),
        (np.full(8000, np.nan, np.float32), 8000, "not finite"),
        (np.full(8000, np.inf, np.float32), 16000, "not finite"),
        (np.zeros(100, np.float32), 8000, "100 samples"),
        (np.zeros(8000, np.float32), 0, "0 Hz"),
    ],
)
def test_audio_that_cannot_be_transcribed_is_refused(trained, waveform, rate, message):
    """Empty, tiny, non-finite or oddly shaped audio is a DataError with the numbers."""
    with pytest.raises(DataError, match=message):
        trained.transcribe(waveform, rate)


def test_transcribing_leaves_training_mode_as_it_was(trained):
    """A recogniser may transcribe while it is being trained."""
    trained.model.train()
    trained.transcribe(np.zeros(8000, np.float32), 8000)
    assert trained.model.training


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokens.json"])
def test_a_missing_file_is_named(saved, name):
    """An incomplete folder is never loaded."""
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        Recogniser.load(saved)


@pytest.mark.parametrize("name", ["model.safetensors", "tokens.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_file_is_named(saved, name, damage):
    """The checksum finds one flipped bit or a lost tail."""
    path = saved / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content) if damage == "flip" else bytes(content[:-7]))
    with pytest.raises(CheckpointError, match=rf"{name}.*damaged"):
        Recogniser.load(saved)


def rewrite(folder: Path, **changes: object) -> None:
    """Change `config.json`, and bring its checksums up to date with the files."""
    description = json.loads((folder / "config.json").read_text())
    description.update(changes)
    description["sha256"] = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in description["sha256"]
    }
    (folder / "config.json").write_text(json.dumps(description))


def test_weights_of_another_model_are_refused(saved):
    """Missing, foreign and mis-shaped tensors are listed, with both shapes."""
    tensors = load_file(saved / "model.safetensors")
    tensors["model.output.bias"] = torch.zeros(3)
    tensors["model.stranger"] = torch.zeros(1)
    del tensors["model.output.weight"]
    save_file(tensors, saved / "model.safetensors")
    rewrite(saved)
    with pytest.raises(CheckpointError, match=r"output\.weight is missing.*stranger.*output\.bias has shape \[3\]"):
        Recogniser.load(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 7}, "different recognisers"),
        ({"format": 99}, "newer Starling"),
        ({"format": 1}, "before Starling 0.2.*train again"),
        ({"colour": "blue"}, "colour"),
        ({"sampling_rate": "fast"}, "sampling_rate"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(saved, changes, message):
    """A file of another recogniser, version or program is a CheckpointError that names the file."""
    rewrite(saved, **changes)
    with pytest.raises(CheckpointError, match=message):
        Recogniser.load(saved)


@pytest.mark.parametrize("content", ["", "[]", "{", "\udcff"])
def test_a_configuration_that_is_not_a_json_object_is_refused(saved, content):
    """Half a file or a different kind of file is a CheckpointError that names it."""
    (saved / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        Recogniser.load(saved)


def test_a_checksum_list_cannot_point_elsewhere(saved):
    """Names of files are only names, never paths out of the folder."""
    (saved.parent / "secret").write_text("not ours")
    description = json.loads((saved / "config.json").read_text())
    description["sha256"]["../secret"] = hashlib.sha256(b"not ours").hexdigest()
    (saved / "config.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=r"'\.\./secret', which is not a file name in this folder"):
        Recogniser.load(saved)
