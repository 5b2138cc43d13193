"""Phones: their sources, and the loss that they add."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from benchmarks.speech_writer import SpeechWriter
from starling.configuration import read_saved
from starling.errors import CheckpointError, ConfigError, DataError
from starling.speech.espeak import pronounce
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import Architecture, build_model, model_config
from starling.speech.models.network import Network
from starling.speech.recogniser import Recogniser
from starling.speech.store import SpeechSet
from starling.speech.tokens import PHONES_FILE, CharacterTokenizer, Phones, PhonesConfig, make_phones, read_lexicon
from starling.speech.training.workload import Batch, load_batch, speech_loss
from tests.speech.test_losses import path_sum

NAMES = ("blstm", "lstm", "transformer", "conformer")
PHONES = Phones.of({"AB": ["a", "b"], "BA": ["b", "a"], "CAB": ["k", "a", "b"]})


def config_of(name: str, decoder: str | None = None, **phones: Any) -> Architecture:
    beside = None if decoder is None else {"kind": decoder, "width": 8}
    return model_config(name=name, preset="tiny", layers=2, phones=PhonesConfig(**phones), decoder=beside)


def built(config: Architecture) -> Network:
    model = build_model(config, 10, 6, seed=1, num_phones=len(PHONES.outputs))
    assert isinstance(model, Network)
    return model


def batch_of(phones: list[list[int]]) -> Batch:
    return Batch(
        features=torch.randn(2, 40, 10, generator=torch.Generator().manual_seed(1)),
        lengths=torch.tensor([40, 23]),
        tokens=torch.tensor([1, 2, 3, 4, 5]),
        token_lengths=torch.tensor([3, 2]),
        seconds=0.6,
        ids=("long", "short"),
        phones=torch.tensor([phone for each in phones for phone in each]).long(),
        phone_lengths=torch.tensor([len(each) for each in phones]),
    )


def test_espeak_pronounces_words() -> None:
    """Each word has a list of IPA phones without stress, which is empty if it cannot be said; letters are spelled."""
    house, about, spelled, nothing = pronounce(["house", "about", "w", "..."], "en-us")
    assert house == ["h", "aʊ", "s"]
    assert about == ["ɐ", "b", "aʊ", "t"]
    assert spelled == ["d", "ʌ", "b", "əl", "j", "uː"]
    assert nothing == []
    assert pronounce(["download"], "de") == [["d", "aʊ", "n", "l", "əʊ", "d"]]  # said as in English
    with pytest.raises(ConfigError, match="no voice 'klingon-x'"):
        pronounce(["house"], "klingon-x")


def test_characters_stand_for_phones_without_a_voice() -> None:
    """This works in any language, without espeak-ng; spaces are not phones."""
    phones, unknown = make_phones(PhonesConfig(voice=None), ["ÉTÉ À", "TÊTE"])
    assert (phones.names, unknown) == (("E", "T", "À", "É", "Ê"), [])
    assert phones.encode("ÉTÉ À") == [4, 2, 4, 3]


def test_a_lexicon_is_read_as_cmudict_writes_it(tmp_path: Path) -> None:
    """Comments, further pronunciations and stress marks are left out; the case of words does not matter."""
    path = tmp_path / "lexicon.txt"
    path.write_text(";;; comment\n\nREAD  R EH1 D\nREAD(1)  R IY1 D\nlead  L IY1 D # metal, not\n", encoding="utf-8")
    assert read_lexicon(path) == {"read": ["R", "EH", "D"], "lead": ["L", "IY", "D"]}
    phones, unknown = make_phones(PhonesConfig(lexicon=path), ["READ THE LEAD", "READ"])
    assert (list(phones.words), unknown) == (["LEAD", "READ"], ["THE"])
    assert phones.outputs == ["", "D", "EH", "IY", "L", "R"]
    assert phones.encode("LEAD READ") == [4, 3, 1, 5, 2, 1]
    assert phones.encode("READ THE LEAD") == []


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"A  AH\nHOUSE\n", ConfigError, "line 2: 'HOUSE' has no phones"),
        (b"\xff\xfe", ConfigError, "cannot be read"),
        ("D\u00c9J\u00c0  D EY1 ZH AA1\n".encode("latin-1"), ConfigError, "cannot be read .*utf-8"),
        (b"OTHER  AH\n", DataError, "pronounces none of the 1 words"),
    ],
)
def test_an_unusable_lexicon_is_refused(tmp_path: Path, content: bytes, error: type[Exception], message: str) -> None:
    """The error has its name and the line."""
    path = tmp_path / "lexicon.txt"
    path.write_bytes(content)
    with pytest.raises(error, match=message) as caught:
        make_phones(PhonesConfig(lexicon=path), ["HOUSE"])
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("decoder", [None, "attention", "transducer"])
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_a_mean_of_both_by_the_weight(name: str, decoder: str | None) -> None:
    """The phones' part is the sum over all paths per token, by enumeration; utterances without phones add nothing."""
    config = config_of(name, decoder, weight=0.25, layer=2)
    model = built(config).eval()
    for phones in ([[1, 2], [3, 3]], [[1, 2], []]):
        whole = batch_of(phones)
        batch = replace(whole, features=whole.features[:, :23], lengths=torch.tensor([23, 20]))
        with torch.no_grad():
            _, lengths, *_, told = model(batch.features, batch.lengths, batch.tokens, batch.token_lengths)
            assert lengths.tolist() == [6, 5]
            rows = zip(told, lengths.tolist(), phones, strict=True)
            total = sum(path_sum(row[:length], each) for row, length, each in rows if each)
            alone = speech_loss(model, batch, config.model_copy(update={"phones": None}))
            expected = 0.75 * alone + 0.25 * total / 5
            torch.testing.assert_close(speech_loss(model, batch, config), expected)


def test_micro_batches_weighted_by_their_tokens_have_the_loss_of_one_batch() -> None:
    """This holds even if only one of them has phones because the other has an unknown word."""
    config = config_of("blstm")
    model, whole = built(config).eval(), batch_of([[1, 2, 3], []])
    first = replace(whole, features=whole.features[:1], lengths=whole.lengths[:1], ids=("long",))
    first = replace(first, tokens=whole.tokens[:3], token_lengths=whole.token_lengths[:1])
    first = replace(first, phone_lengths=torch.tensor([3]))
    second = replace(whole, features=whole.features[1:, :23], lengths=whole.lengths[1:], ids=("short",))
    second = replace(second, tokens=whole.tokens[3:], token_lengths=whole.token_lengths[1:])
    second = replace(second, phones=torch.zeros(0, dtype=torch.int64), phone_lengths=torch.tensor([0]))
    with torch.no_grad():
        parts = 3 * speech_loss(model, first, config) + 2 * speech_loss(model, second, config)
        torch.testing.assert_close(parts / 5, speech_loss(model, whole, config))


@pytest.mark.parametrize("name", NAMES)
def test_phones_train_only_the_layers_up_to_their_own(name: str) -> None:
    """With phones at layer 1, layer 2 gets no gradient from them; the outputs are those of a model without phones."""
    config = config_of(name)
    model, batch = built(config).eval(), batch_of([[1, 2], [3, 3]])
    *_, told = model(batch.features, batch.lengths, batch.tokens, batch.token_lengths)
    told.sum().backward()
    lower, upper = (model.stacked.modules[place].parameters() for place in (0, 1))  # type: ignore[union-attr]
    assert all(each.grad is not None for each in lower)
    assert all(each.grad is None for each in upper)
    plain = build_model(config.model_copy(update={"phones": None}), 10, 6, seed=1).eval()
    torch.testing.assert_close(
        model(batch.features, batch.lengths)[0], plain(batch.features, batch.lengths)[0], rtol=0, atol=0
    )


def test_a_void_batch_and_one_without_known_words_have_gradients_of_zero() -> None:
    """The phones' own parameters have gradients, too, as DDP requires."""
    config = config_of("blstm")
    none_known, void = batch_of([[], []]), replace(batch_of([[], []]), ids=())
    void = replace(void, tokens=void.tokens[:0], token_lengths=torch.zeros(2, dtype=torch.int64))
    for batch in (none_known, void):
        model = built(config)
        speech_loss(model, batch, config).backward()
        assert model.phones is not None
        assert all(each.grad is not None and not each.grad.count_nonzero() for each in model.phones.parameters())


def test_more_phones_than_frames_is_not_an_error() -> None:
    """Such an utterance has no gradient from phones; the loss stays finite."""
    config, model = config_of("blstm"), built(config_of("blstm"))
    assert bool(speech_loss(model, batch_of([[1, 2], [1] * 20]), config).isfinite())


def test_a_batch_has_the_phones_of_its_texts(tmp_path: Path) -> None:
    """They are in the order of its utterances, also on another device."""
    with SpeechWriter(tmp_path / "pair", "pair", 8000) as writer:
        writer.write("one", "s", "AB BA", np.random.default_rng(1).standard_normal(8000).astype(np.float32))
        writer.write("two", "s", "AB XX", np.random.default_rng(2).standard_normal(8000).astype(np.float32))
        writer.finish(digest="pair")
    features, tokenizer = LogMel(FeatureConfig(), 8000), CharacterTokenizer(" ABX")
    speech_set = SpeechSet.open(tmp_path / "pair")
    batch = load_batch(speech_set, np.array([1, 0]), features, None, tokenizer, 1, phones=PHONES).to("cpu")
    assert batch.phones is not None
    assert batch.phone_lengths is not None
    assert [PHONES.outputs[phone] for phone in batch.phones.tolist()] == ["a", "b", "b", "a"]
    assert batch.phone_lengths.tolist() == [0, 4]


def test_a_recogniser_keeps_its_phones(tmp_path: Path) -> None:
    """Their weights are kept, too; a damaged file is refused by its name."""
    tokenizer = CharacterTokenizer(" ABC")
    made = Recogniser.create(config_of("blstm"), LogMel(FeatureConfig(), 8000), tokenizer, 1, phones=PHONES)
    made.save(tmp_path)
    loaded = Recogniser.load(tmp_path)
    assert loaded.phones is not None
    assert loaded.phones.names == PHONES.names
    assert loaded.phones.encode("CAB BA") == PHONES.encode("CAB BA")
    for name, value in made.model.state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name], value, rtol=0, atol=0)
    (tmp_path / "phones.json").write_text(json.dumps({"names": ["a"], "words": {"AB": [2]}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"phones\.json"):
        Recogniser.load(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"phones\.json cannot be read: a word has a phone whose number is not between 1 and 1",
    ):
        read_saved(Phones, tmp_path / PHONES_FILE)


def test_impossible_layers_are_refused() -> None:
    """A layer is impossible above the last one, or in a network whose layers have different frame rates."""
    with pytest.raises(ValidationError, match=r"phones\.layer is 3, but model\.layers is 2; lower it"):
        config_of("blstm", layer=3)
    with pytest.raises(ValidationError, match="phones: zipformer has no layer for them; blstm, lstm, trans"):
        model_config(name="zipformer", preset="tiny", phones=PhonesConfig())
