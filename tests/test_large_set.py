"""The benchmarks' large sets are valid sets, like those that `starling prepare` would have written."""

import json
from pathlib import Path

import numpy as np

from benchmarks.large_set import RATE, SHARD_SIZE, write_large_set
from benchmarks.scale_reader import main
from starling.speech.store import SpeechSet


def test_a_generated_set_opens_and_has_every_kind_of_audio(tmp_path: Path) -> None:
    """The set has shards, texts, speakers, and samples of the length that the index states."""
    write_large_set(tmp_path / "large", 2500)
    opened = SpeechSet.open(tmp_path / "large")
    assert len(opened) == 2500 and len(opened.summary.shards) == 3
    assert opened.text(2345) == "THREE FOUR FIVE" and opened.id(2345) == "utterance-00002345"
    assert opened.speaker(2345) == "speaker-000011"
    lengths = {len(opened.audio(index)) for index in range(SHARD_SIZE - 50, SHARD_SIZE + 50)}
    assert lengths == set(np.unique(opened.num_samples).tolist()) and min(lengths) == RATE


def test_the_figures_of_a_learner_on_it_are_positive(tmp_path: Path) -> None:
    """A learner records seconds, memory, and a mini-batch that contains something."""
    write_large_set(tmp_path / "large", 2500)
    main(tmp_path / "large", epoch=3, place=0.5, utterances=3000, result=tmp_path / "note.json")
    noted = json.loads((tmp_path / "note.json").read_text())
    assert noted["first"] > 0 and noted["seconds"] > 0 and set(noted) == {"first", "seconds", "anon", "file"}
