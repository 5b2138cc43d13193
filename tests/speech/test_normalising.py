"""Normalisation of texts before they are scored."""

import pytest

from starling.errors import ConfigError
from starling.speech.commands.score import normaliser


def test_punctuation_goes_and_words_stay_whole() -> None:
    """Apostrophes inside words stay; dashes separate; letters of all languages stay."""
    normalised = normaliser(["punctuation"])
    assert normalised("Well, it's “twenty-one” - isn’t it? 'Yes'!") == "Well it's twenty one isn't it Yes"
    assert normalised("¿Qué? und/oder naïve … 50 %") == "Qué und oder naïve 50"


def test_numbers_are_written_in_words() -> None:
    """Cardinals, decimals and ordinals are written in the case of the texts; numbers inside words stay."""
    pytest.importorskip("num2words", reason="the extra `decoding` is not installed")
    small = normaliser(["numbers"], ["some text"])
    assert small("call 42 on the 2nd, 1,234 times or 3.5") == (
        "call forty two on the second, one thousand two hundred and thirty four times or three point five"
    )
    assert small("b2b mp3 x86") == "b2b mp3 x86"
    assert normaliser(["numbers"], ["SOME TEXT", "7"])("7 UP") == "SEVEN UP"
    assert normaliser(["numbers"], ["etwas"], "de")("21 Uhr") == "einundzwanzig Uhr"
    assert (
        normaliser(["numbers", "punctuation", "case"], ["Some"])("The 21st: 3.5!")
        == "the twenty first three point five"
    )
    long = "9" * 40
    assert small(long) == long


def test_unknown_kinds_and_languages_are_refused() -> None:
    """The error lists the known ones."""
    with pytest.raises(ConfigError, match=r"no normaliser 'number'; known are numbers, punctuation, case"):
        normaliser(["number"])
    pytest.importorskip("num2words", reason="the extra `decoding` is not installed")
    with pytest.raises(ConfigError, match="language 'klingon'"):
        normaliser(["numbers"], language="klingon")


def test_without_kinds_only_spaces_change() -> None:
    """Normalisation is off by default."""
    assert normaliser([])("It's  2 A.M.") == "It's 2 A.M."
