"""The small corpus of tones, and the recipe for it."""

from tests.runs.conftest import songs, tree

__all__ = ["songs", "tree"]
