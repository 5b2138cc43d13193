"""Decoders learn a language of tones, search it, and are saved and loaded."""

from pathlib import Path

import numpy as np
import pytest
import torch
from planned import epoch_of, planner_of
from tones import song_set

from starling.chance import derive_seed
from starling.speech.batch_plan import BatchConfig
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import model_config
from starling.speech.recogniser import Recogniser
from starling.speech.scoring import error_rates
from starling.speech.tokens import TokenConfig, make_tokenizer
from starling.speech.training.workload import load_batch, speech_loss


@pytest.mark.wide
@pytest.mark.parametrize(
    ("decoder", "rate"),
    [
        ({"kind": "transducer", "width": 32, "context": 1}, 0.01),
        ({"kind": "attention", "width": 32, "layers": 1, "dropout": 0.0}, 0.005),
    ],
    ids=["transducer", "attention"],
)
def test_a_decoder_learns_a_language(decoder: dict[str, object], rate: float, tmp_path: Path):
    """After 300 mini-batches its greedy texts and those of its beam have a WER of at most 15 % on its training data;
    after loading, it gives the same texts."""
    torch.set_num_threads(1)
    songs = song_set(tmp_path / "train", 60)
    tokenizer = make_tokenizer(TokenConfig(), [songs.text(index) for index in range(60)])
    features = LogMel(FeatureConfig(normalise="global"), songs.sampling_rate)
    features.fit(songs)
    config = model_config(**{"preset": "tiny", "decoder": decoder})
    recogniser = Recogniser.create(config, features, tokenizer, seed=1)
    optimizer = torch.optim.Adam(recogniser.model.parameters(), lr=rate)
    planner = planner_of(songs.durations, np.zeros(60, np.int32), BatchConfig(max_duration=8), seed=1)
    for epoch in range(25):
        for number, mini in enumerate(epoch_of(planner, epoch)):
            batch = load_batch(songs, mini[0], features, None, tokenizer, derive_seed(1, "batch", epoch, number))
            optimizer.zero_grad()
            speech_loss(recogniser.model, batch, config).backward()
            torch.nn.utils.clip_grad_norm_(recogniser.model.parameters(), 5.0)
            optimizer.step()
    references = {songs.id(index): songs.text(index) for index in range(60)}
    greedy = recogniser.recognise(songs)
    assert error_rates(references, greedy).wer <= 15
    searched: dict[str, str] = {}
    for names, heard in recogniser.heard(songs):
        searched.update(zip(names, recogniser.searched(heard, beam=4), strict=True))
    assert error_rates(references, searched).wer <= 15
    recogniser.save(tmp_path / "saved")
    again = Recogniser.load(tmp_path / "saved")
    assert again.model_config == config
    assert again.recognise(songs) == greedy
