"""Makes what tests/test_kept.py reads: python tests/data/make_kept.py FOLDER, of the version that is to be kept."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import soundfile

from starling.checkpoint.reader import latest, load
from starling.speech.recogniser import Recogniser
from starling.speech.store import SpeechSet

RATE = 4000
RECIPE = """\
# The recipe of an experiment that is kept, to show that later versions read it.
name: kept
data:
  folder: data
  corpus:
    kind: tsv
    path: corpus/tones.tsv
    sets: {train: {split: train}, test: {split: test}}
  sampling_rate: 4000
  valid: null
learners: 2
strategy: adpsgd
budget: {epochs: 150}
augment: {speed: [1.0], spec_augment: null}
batches: {max_duration: 1}
model: {name: lstm, preset: tiny, hidden: 16, channels: 8, subsampling: 2}
features: {num_mels: 8}
optimizer: {name: adamw, lr: 5e-2}
engine: {threads: 1}
"""


def main(folder: Path) -> None:
    """Write a corpus of tones, train on it, and keep what came of it."""
    (folder / "corpus").mkdir(parents=True)
    (folder / "kept.yaml").write_text(RECIPE, encoding="utf-8")
    generator = np.random.default_rng(1)
    lines = ["id\tspeaker\tsplit\taudio\ttext"]
    for number in range(10):
        text = "".join(generator.choice(list("AB"), 3))
        tones = [np.sin(2 * np.pi * {"A": 400, "B": 900}[each] * np.arange(600) / RATE) for each in text]
        soundfile.write(folder / "corpus" / f"{number}.flac", 0.3 * np.concatenate(tones), RATE)
        lines.append(f"u{number}\ts{number % 2}\t{'train' if number < 8 else 'test'}\t{number}.flac\t{text}")
    (folder / "corpus" / "tones.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.chdir(folder)
    subprocess.run([sys.executable, "-m", "starling", "train", "kept.yaml"], check=True)
    for name in ("log", "tensorboard", "status.json", "decode", "joins", "env.txt"):
        path = Path("exp/kept") / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    recogniser = Recogniser.load(load(latest(Path("exp/kept"))).model_folder)
    heard = recogniser.recognise(SpeechSet.open(Path("data/test")))
    Path("heard.json").write_text(json.dumps(heard, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
