"""Trains the recogniser of tones in tests/data/tones: python -m tests.data.make_tones."""

from pathlib import Path

import numpy as np
import torch

from starling.chance import derive_seed
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import model_config
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import CharacterTokenizer
from starling.speech.training.workload import Batch, speech_loss
from tests.speech.tones import RATE, WORDS, performance

FOLDER = Path(__file__).parent / "tones"
STEPS, UTTERANCES = 1800, 12


def main() -> None:
    """Learn words with and without pauses between them, and silence."""
    torch.set_num_threads(1)
    features = LogMel(FeatureConfig(num_mels=16), RATE)
    tokenizer = CharacterTokenizer(" ADEFIMOR")
    config = model_config(preset="tiny", hidden=32, channels=8, subsampling=2)
    recogniser = Recogniser.create(config, features, tokenizer, seed=1)
    optimizer = torch.optim.AdamW(recogniser.model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, STEPS, pct_start=0.15)
    generator = np.random.default_rng(derive_seed(1, "tones"))
    for step in range(STEPS):
        texts, matrices = [], []
        for _ in range(UTTERANCES):
            words = generator.choice(list(WORDS), generator.integers(1, 7)).tolist()
            gaps = [*generator.uniform(0.02, 0.45, len(words)), generator.uniform(0.0, 0.3)]
            waveform, _ = performance(words, gaps, generator, noise=10 ** generator.uniform(-4, -2))
            texts.append(tokenizer.encode(" ".join(words)))
            matrices.append(features(torch.from_numpy(waveform)))
        batch = Batch(
            features=torch.nn.utils.rnn.pad_sequence(matrices, batch_first=True),
            lengths=torch.tensor([len(each) for each in matrices]),
            tokens=torch.tensor([token for text in texts for token in text]),
            token_lengths=torch.tensor([len(each) for each in texts]),
            seconds=0.0,
            ids=("",) * UTTERANCES,
        )
        optimizer.zero_grad()
        loss = speech_loss(recogniser.model, batch, model_config())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(recogniser.model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(step, float(loss.detach()) / UTTERANCES)  # noqa: T201 - a script
    recogniser.save(FOLDER)


if __name__ == "__main__":
    main()
