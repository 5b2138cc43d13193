"""Tokens, which are the network's outputs, and conversion between text and tokens. Id 0 is CTC's blank.

Also the phones of transcripts, which are the targets of a second CTC loss at a lower layer. They are used only in
training.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from starling.configuration import Config
from starling.errors import CheckpointError, ConfigError, DataError, require

BLANK = 0
WORD_START = "\u2581"
"""The mark, in the names of tokens, of the beginning of a word, as in sentencepiece."""
_NAMES = {" ": WORD_START, WORD_START: "\\u2581"}
_CHARACTERS_FILE = "tokens.json"
_PIECES_FILE = "tokens.model"


class TokenConfig(Config):
    """The kind of tokens; the `tokens:` section of a recipe."""

    kind: Literal["characters", "sentencepiece"] = "characters"
    """The kind of tokens: single characters, or pieces of words that SentencePiece finds in the training texts."""
    alphabet: str | None = None
    """The allowed characters, for kind: characters. By default, these are the characters of the training texts."""
    vocab_size: int = Field(default=100, ge=3)
    """Maximum number of pieces, for kind: sentencepiece."""
    model_type: Literal["unigram", "bpe"] = "unigram"
    """The algorithm that finds pieces, for kind: sentencepiece."""

    @model_validator(mode="after")
    def _alphabet_fits(self) -> Self:
        if self.alphabet is None:
            return self
        if self.kind != "characters":
            raise ValueError("tokens.alphabet is only for `kind: characters`; remove it for sentencepiece")
        repeated = sorted({character for character in self.alphabet if self.alphabet.count(character) > 1})
        if repeated or not self.alphabet:
            raise ValueError(f"tokens.alphabet must have at least one character, and none twice; repeated: {repeated}")
        return self


class CharacterTokenizer:
    """Converts text to token ids and back. Each character is a token, and ids follow the order of the alphabet."""

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self._ids = {character: index + 1 for index, character in enumerate(alphabet)}

    @property
    def vocab_size(self) -> int:
        """The number of the network's outputs: the blank, and all tokens, whose ids begin with 1."""
        return len(self.alphabet) + 1

    @property
    def names(self) -> list[str]:
        """The written form of each token, in the order of ids. `WORD_START` stands for a space, and the blank is
        empty."""
        return ["", *(_NAMES.get(character, character) for character in self.alphabet)]

    def encode(self, text: str, utterance: str = "") -> list[int]:
        """The token ids of `text`.

        Raises DataError, naming `utterance`, for an empty text or a character outside the alphabet.
        """
        _refuse_empty(text, utterance)
        try:
            return [self._ids[character] for character in text]
        except KeyError as missing:
            raise _outside(missing.args[0], text, utterance, self.alphabet) from None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text that token ids spell. Blanks are ignored."""
        return "".join(self.alphabet[token - 1] for token in tokens if token != BLANK)

    def save(self, folder: Path) -> Path:
        """Write the file that `load_tokenizer` reads, and return its path."""
        path = folder / _CHARACTERS_FILE
        path.write_text(json.dumps({"kind": "characters", "alphabet": self.alphabet}), encoding="utf-8")
        return path


class PieceTokenizer:
    """Converts text to token ids and back, using the pieces of a sentencepiece model. Token ids are those of the model
    plus one, because the blank has id 0."""

    def __init__(self, model: bytes) -> None:
        import sentencepiece

        self._model = model
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._unknown = int(self._pieces.unk_id())

    def __reduce__(self) -> tuple[type[Self], tuple[bytes]]:
        return type(self), (self._model,)

    @property
    def vocab_size(self) -> int:
        return int(self._pieces.get_piece_size()) + 1

    @property
    def names(self) -> list[str]:
        return ["", *(str(self._pieces.id_to_piece(piece)) for piece in range(self.vocab_size - 1))]

    def encode(self, text: str, utterance: str = "") -> list[int]:
        _refuse_empty(text, utterance)
        pieces: list[int] = self._pieces.encode(text)
        if self._unknown in pieces:
            # only characters that no piece contains are unknown
            alone = (c for c in text if not c.isspace() and self._unknown in self._pieces.encode(c))
            raise _outside(next(alone, "?"), text, utterance, "the characters of the training texts")
        return [piece + 1 for piece in pieces]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._pieces.decode([token - 1 for token in tokens if token != BLANK]))

    def save(self, folder: Path) -> Path:
        path = folder / _PIECES_FILE
        path.write_bytes(self._model)
        return path


Tokenizer = CharacterTokenizer | PieceTokenizer


def make_tokenizer(config: TokenConfig, texts: Iterable[str]) -> Tokenizer:
    """Make the tokenizer of a recipe from the training texts. The same texts always give the same tokenizer.

    Raises DataError if no tokens can be made from the texts.
    """
    if config.kind == "characters":
        alphabet = config.alphabet or "".join(sorted(set().union(*map(set, texts))))
        if not alphabet:
            raise DataError("the training texts contain no characters, so there are no tokens")
        return CharacterTokenizer(alphabet)
    return PieceTokenizer(_train_pieces(config, texts))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer that `save` wrote to `folder`. Raises CheckpointError if it is missing or damaged."""
    characters, pieces = folder / _CHARACTERS_FILE, folder / _PIECES_FILE
    try:
        if pieces.exists():
            return PieceTokenizer(pieces.read_bytes())
        content = json.loads(characters.read_text(encoding="utf-8"))
        return CharacterTokenizer(TokenConfig(alphabet=content["alphabet"]).alphabet or "")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} contains neither {_CHARACTERS_FILE} nor {_PIECES_FILE}") from None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:  # RecursionError is a RuntimeError
        raise CheckpointError(f"the tokens in {folder} cannot be read: {error}") from error


def _train_pieces(config: TokenConfig, texts: Iterable[str]) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            normalization_rule_name="identity",
            num_threads=1,
            bos_id=-1,
            eos_id=-1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise DataError(f"sentencepiece cannot make {config.vocab_size} pieces from these texts: {error}") from error
    return model.getvalue()


def _refuse_empty(text: str, utterance: str) -> None:
    if not text.strip():
        raise DataError(f"the transcript of utterance {utterance!r} is empty: remove it from the manifest")


def _outside(character: str, text: str, utterance: str, alphabet: str) -> DataError:
    return DataError(
        f"utterance {utterance!r} contains the character {character!r} (U+{ord(character):04X}), which is outside "
        f"the alphabet {alphabet!r}: correct the text {text!r}, choose another data.text normaliser, or add the "
        "character to tokens.alphabet"
    )


PHONES_FILE = "phones.json"
_COMMENTS = (";;;", "#")


class PhonesConfig(Config):
    """A second loss, on phones. The total loss is `(1 - weight) * loss + weight * CTC of phones`."""

    layer: int = Field(default=1, ge=1)
    """The layer or block that predicts the phones; 1 is the first."""
    weight: float = Field(default=0.6, gt=0, lt=1)
    """Weight of the phones' CTC loss in the total loss."""
    voice: str | None = "en-us"
    """The voice of espeak-ng that pronounces the words. With null, the characters of the words replace phones."""
    lexicon: Path | None = None
    """A text file with a word and its phones on each line, as in CMUdict; used instead of espeak-ng."""


class Phones(Config):
    """The phones of words; the contents of `phones.json`."""

    format: int = Field(default=1, ge=1, le=1)
    names: tuple[str, ...] = Field(min_length=1)
    """The phones, numbered from 1; number 0 is CTC's blank."""
    words: dict[str, tuple[int, ...]]
    """The numbers of the phones of each word."""

    @model_validator(mode="after")
    def _phones_are_named(self) -> Self:
        if any(not 0 < phone <= len(self.names) for phones in self.words.values() for phone in phones):
            raise ValueError(f"a word has a phone whose number is not between 1 and {len(self.names)}")
        return self

    @classmethod
    def of(cls, pronunciations: Mapping[str, Sequence[str]]) -> Self:
        """Create the phones from words and the names of each word's phones."""
        names = sorted({phone for phones in pronunciations.values() for phone in phones})
        numbers = {name: number for number, name in enumerate(names, 1)}
        words = {word: tuple(numbers[each] for each in phones) for word, phones in pronunciations.items()}
        return cls(names=tuple(names), words=words)

    @property
    def outputs(self) -> list[str]:
        """The names of all outputs. The first output is the blank, whose name is empty."""
        return ["", *self.names]

    def encode(self, text: str) -> list[int]:
        """The numbers of the phones of a text's words, one word after another; empty if any word is unknown."""
        words = text.split()
        if any(word not in self.words for word in words):
            return []
        return [phone for word in words for phone in self.words[word]]


def make_phones(config: PhonesConfig, texts: Iterable[str]) -> tuple[Phones, list[str]]:
    """Look up the words of `texts` in the lexicon or with espeak-ng. Returns their phones, and the words without
    phones, sorted.

    Raises:
        ConfigError: The lexicon cannot be read, or espeak-ng has no such voice.
        MissingExtraError: espeakng-loader is not installed.
        DataError: None of the words has phones.
    """
    words = sorted({word for text in texts for word in text.split()})
    if config.lexicon is not None:
        listed = read_lexicon(config.lexicon)
        found = {word: listed[word.casefold()] for word in words if word.casefold() in listed}
        source = str(config.lexicon)
    elif config.voice is None:
        found, source = {word: list(word) for word in words}, "spelling"
    else:
        require("demo", "model.phones without a lexicon", ["espeakng_loader"])
        from starling.speech.espeak import pronounce

        spoken = pronounce([word.lower() for word in words], config.voice)
        found = {word: phones for word, phones in zip(words, spoken, strict=True) if phones}
        source = f"espeak-ng with the voice {config.voice!r}"
    if not found:
        raise DataError(f"model.phones: {source} pronounces none of the {len(words)} words of the training set")
    return Phones.of(found), [word for word in words if word not in found]


def read_lexicon(path: Path) -> dict[str, list[str]]:
    """The phones of each word, by the word in lower case, from a file with a word and its phones on each line.

    The first of several pronunciations is used. As in CMUdict, `WORD(1)` is a variant of `WORD`. Stress marks (the
    digits 0 to 2 at the end of phones) are dropped. Raises ConfigError, naming the line, for a word without phones.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.phones.lexicon: {path} cannot be read ({error})") from error
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        line = line.partition(" #")[0]
        if not line.strip() or line.startswith(_COMMENTS):
            continue
        word, *phones = line.split()
        if not phones:
            raise ConfigError(
                f"model.phones.lexicon: {path}, line {number}: {word!r} has no phones; write a word and its phones, "
                "with spaces between them, on each line"
            )
        if word.endswith(")") and "(" in word[1:]:
            word = word[: word.rindex("(")]
        found.setdefault(word.casefold(), [phone.rstrip("012") or phone for phone in phones])
    return found
