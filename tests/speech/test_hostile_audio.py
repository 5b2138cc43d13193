"""Damaged or malicious audio gives a DataError, or audio, quickly and in little memory."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from corpus_builders import RATE, sound

from starling.errors import DataError
from starling.speech.audio import read_audio


@pytest.mark.wide
def test_2000_mutations_end_soon_in_little_memory_and_in_nothing_but_data_errors(tmp_path: Path) -> None:
    """WAV and FLAC, integers and floats are read in a process that may take 768 MB more than an empty one."""
    command = [sys.executable, "-m", "tests.speech.mutated_audio", str(tmp_path), "2000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    assert ends["accepted"] + ends["refused"] == 2000
    assert ends["accepted"] > 100 and ends["refused"] > 1000
    assert all(ends[reason] > 0 for reason in ("truncated", "silent", "not finite", "full scale"))
    assert ends["longest"] < 1.0


def _wav(data_bytes: int, rate: int = RATE, channels: int = 1, kind: bytes = b"RIFF") -> bytes:
    """A WAV that claims `claimed` bytes of audio, and has 4,000."""
    header = struct.pack("<HHIIHH", 1, channels, rate, rate * 2 * channels, 2 * channels, 16)
    riff = kind + struct.pack("<I", min(data_bytes + 36, 2**32 - 1)) + b"WAVEfmt " + struct.pack("<I", 16) + header
    return riff + b"data" + struct.pack("<I", data_bytes) + sound(0.25).tobytes()


def _flac(tmp_path: Path, rate: int, samples: int, channels: int = 1) -> bytes:
    """A FLAC whose header claims that many samples."""
    path = tmp_path / "small.flac"
    soundfile.write(path, sound(0.25), RATE)
    content = bytearray(path.read_bytes())
    content[18:26] = (rate << 44 | (channels - 1) << 41 | 15 << 36 | samples).to_bytes(8, "big")
    return bytes(content)


@pytest.mark.parametrize("size", [0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF, 0x80000000])
def test_a_wav_that_claims_4_gib_is_refused_or_what_is_there(tmp_path: Path, size: int) -> None:
    """Sizes of streams of unknown length are placeholders; whatever is claimed, the 4,000 bytes count."""
    path = tmp_path / "a.wav"
    path.write_bytes(_wav(size))
    try:
        samples, _ = read_audio(path)
    except DataError as error:
        assert str(path) in str(error)
    else:
        np.testing.assert_array_equal(samples * 32768, sound(0.25))


@pytest.mark.parametrize(
    ("rate", "samples"), [(RATE, 2**36 - 1), (1, 2**36 - 1), (655_350, 2**36 - 1), (655_350, 10**9)]
)
def test_a_flac_that_claims_days_is_refused_by_name(tmp_path: Path, rate: int, samples: int) -> None:
    """This holds even if the sampling rate turns it into an hour."""
    path = tmp_path / "a.flac"
    path.write_bytes(_flac(tmp_path, rate, samples))
    with pytest.raises(DataError, match=r"a\.flac: .*(declares|truncated|cannot be read|the segment)"):
        read_audio(path)


def test_a_small_flac_cannot_become_more_than_an_hour_at_48_khz(tmp_path: Path) -> None:
    """Silence compresses a thousandfold: samples are counted before they are read, whatever the sampling rate."""
    path = tmp_path / "silence.flac"
    with soundfile.SoundFile(path, "w", 655_350, 1) as file:
        for _ in range(180):
            file.write(np.zeros(10**6, np.int16))
    assert path.stat().st_size < 10**6
    with pytest.raises(DataError, match="declares 180000000 samples, the limit is 172800000"):
        read_audio(path)
