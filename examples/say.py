"""Synthesise a WAV file to try a recogniser on: `python examples/say.py "three seven one" hello.wav`."""

import sys
from pathlib import Path

import soundfile

from starling.speech.espeak import Sentence, speak


def main(text: str, path: Path) -> None:
    (samples, rate), *_ = speak([Sentence(text, voice="en-us+f2", rate=120, pitch=50, range=50)])
    soundfile.write(path, samples, rate)
    print(f"{path}: {len(samples) / rate:.2f} s at {rate} Hz")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
