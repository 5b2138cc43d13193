"""Tokens: text survives encoding and decoding, and what cannot be encoded is named."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from starling.errors import CheckpointError, DataError
from starling.speech.tokens import BLANK, CharacterTokenizer, TokenConfig, load_tokenizer, make_tokenizer

TEXTS = ["ZERO ONE TWO", "THREE FOUR FIVE", "SIX SEVEN", "EIGHT NINE ZERO", "NINE NINE"] * 5
CONFIGS = [TokenConfig(), TokenConfig(kind="sentencepiece", vocab_size=30)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_every_text_comes_back(config):
    """Decoding what was encoded gives the text, and no token is the blank or outside the vocabulary."""
    tokenizer = make_tokenizer(config, TEXTS)
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert all(BLANK < token < tokenizer.vocab_size for token in tokens)


@given(st.text(alphabet="AB Ç", min_size=1).filter(str.strip))
def test_characters_come_back_from_any_text_of_the_alphabet(text):
    """Spaces anywhere and letters beyond ASCII are characters like any other."""
    tokenizer = CharacterTokenizer("AB Ç")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_character_outside_the_alphabet_is_named(config):
    """The message names the utterance, the character, its code and what to do."""
    tokenizer = make_tokenizer(config, TEXTS)
    with pytest.raises(DataError, match=r"'u3'.*'Ä' \(U\+00C4\).*tokens\.alphabet"):
        tokenizer.encode("ZERO ÄINS", "u3")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_an_empty_transcript_is_named(config):
    """An empty transcript, or one of only spaces, is a DataError with the id."""
    with pytest.raises(DataError, match=r"'u4' is empty"):
        make_tokenizer(config, TEXTS).encode("  ", "u4")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_saved_tokens_are_the_same_tokens(config, tmp_path):
    """Saving and loading, or sending to another process, changes no id."""
    tokenizer = make_tokenizer(config, TEXTS)
    tokenizer.save(tmp_path)
    for twin in (load_tokenizer(tmp_path), copy.deepcopy(tokenizer)):
        assert twin.vocab_size == tokenizer.vocab_size
        assert [twin.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_the_same_texts_make_the_same_tokens(config):
    """Every learner that makes its own tokenizer gets the same one."""
    first, second = (make_tokenizer(config, TEXTS) for _ in range(2))
    assert first.encode("SEVEN NINE") == second.encode("SEVEN NINE")
    assert first.vocab_size == second.vocab_size


def test_damaged_or_missing_tokens_are_named(tmp_path):
    """A folder without tokens, or with half a file, is a CheckpointError that names it."""
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
    (tmp_path / "tokens.json").write_text('{"kind": "char')
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
    (tmp_path / "tokens.model").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_texts_without_characters_are_refused():
    """Without training texts there are no tokens."""
    with pytest.raises(DataError, match="contain no characters"):
        make_tokenizer(TokenConfig(), [])
    with pytest.raises(DataError, match="sentencepiece"):
        make_tokenizer(TokenConfig(kind="sentencepiece"), [])


@pytest.mark.parametrize("wrong", [{"alphabet": "AA"}, {"alphabet": ""}, {"kind": "sentencepiece", "alphabet": "A"}])
def test_impossible_alphabets_are_refused(wrong):
    """Repeated or no characters, or an alphabet for pieces, never start a run."""
    with pytest.raises(ValidationError):
        TokenConfig.model_validate(wrong)
