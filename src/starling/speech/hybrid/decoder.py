"""The best words: a Viterbi search over the states of all words."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starling.speech.hybrid.lexicon import TiedStates
from starling.speech.hybrid.viterbi import NEVER
from starling.speech.tokens import Tokenizer

_MOST_STEPS = 1 << 27
"""Bytes of memory for what a search remembers of the utterances that it looks at together."""


class WordDecoder:
    """Scaled likelihoods of tied states in, texts out.

    Words are chains of states. In a `loop`, an utterance is any number of words, with silence anywhere between them; of
    `one`, it is a word between two silences, which may be empty. Every word is as probable as any other, and costs
    `decoding.word_penalty`.
    """

    def __init__(self, states: TiedStates, tokenizer: Tokenizer) -> None:
        self._states = states
        self._words = states.words
        transcriber = states.transcriber(tokenizer)
        silence = states.tree.tied(transcriber.silence)
        is_loop = states.decoding.words == "loop"
        chains = [[silence], *([] if is_loop else [[silence]])]
        num_silences = len(chains)
        chains += [[states.tree.tied(each) for each in transcriber.word(word)] for word in self._words]
        sizes = [len(chain) for chain in chains]
        ends = np.cumsum(sizes)
        starts = ends - sizes
        word_starts = torch.from_numpy(starts[num_silences:])
        word_ends = torch.from_numpy(ends[num_silences:] - 1)
        self._emitted = torch.tensor([state for chain in chains for state in chain])
        self._is_start = torch.zeros(int(ends[-1]), dtype=torch.bool)
        self._is_start[torch.from_numpy(starts)] = True
        self._word_at: NDArray[np.int64] = np.full(int(ends[-1]), -1)
        self._word_at[starts[num_silences:]] = np.arange(len(self._words))
        first = torch.tensor([0])
        if is_loop:  # what leads to which starts
            every_start, every_end = torch.cat([first, word_starts]), torch.cat([first, word_ends])
            self._junctions = [(every_end, every_start)]
            self._finals = every_end
        else:
            self._junctions = [(first, word_starts), (word_ends, first + 1)]
            self._finals = torch.cat([word_ends, first + 1])
        self._begin = torch.full((int(ends[-1]),), NEVER)
        self._begin[first] = 0.0
        self._cost = torch.zeros(int(ends[-1]))
        self._cost[word_starts] = states.decoding.word_penalty or 0.0
        self._begin[word_starts] = -self._cost[word_starts]

    def __call__(self, log_posteriors: Tensor, lengths: Tensor) -> list[str]:
        """The text of each utterance, of log posteriors `[B, T, S]` and lengths `[B]`; empty where no word fits."""
        scores = self._states.scaled(log_posteriors.float().cpu(), self._states.decoding.prior_scale)
        lengths = lengths.cpu()
        together = max(1, _MOST_STEPS // (scores.shape[1] * len(self._emitted)))
        texts: list[str] = []
        for first in range(0, len(scores), together):
            some = slice(first, first + together)
            texts += [
                " ".join(self._words[word] for word in words) for words in self._search(scores[some], lengths[some])
            ]
        return texts

    def _search(self, scores: Tensor, lengths: Tensor) -> list[list[int]]:
        """The words of each utterance, by number."""
        count, num_frames, _ = scores.shape
        size = len(self._emitted)
        never = scores.new_full((count, 1), NEVER)
        steps = torch.zeros(num_frames, count, size, dtype=torch.int8)  # 0: stay, 1: next in the chain, 2 + j: junction
        entered_from = torch.zeros(num_frames, count, len(self._junctions), dtype=torch.int64)
        best = self._begin + scores[:, 0, self._emitted]
        for frame in range(1, num_frames):
            moved = torch.cat([never, best[:, :-1]], dim=1).masked_fill(self._is_start, NEVER)
            is_moved = moved > best
            following, step = torch.where(is_moved, moved, best), is_moved.to(torch.int8)
            for number, (leave, enter) in enumerate(self._junctions):
                value, place = best[:, leave].max(dim=1)
                entered_from[frame, :, number] = leave[place]
                entering = value[:, None] - self._cost[enter]
                is_entered = entering > following[:, enter]
                following[:, enter] = torch.where(is_entered, entering, following[:, enter])
                step[:, enter] = torch.where(is_entered, 2 + number, step[:, enter])
            following += scores[:, frame, self._emitted]
            inside = (frame < lengths)[:, None]
            best = torch.where(inside, following, best)
            steps[frame] = step * inside
        values, places = best[:, self._finals].max(dim=1)
        ends = self._finals[places]
        found = []
        for row in range(count):
            is_possible = bool(torch.isfinite(values[row]))
            last = int(lengths[row])
            found.append(
                self._trace(int(ends[row]), steps[:last, row].numpy(), entered_from[:last, row].numpy())
                if is_possible
                else []
            )
        return found

    def _trace(self, state: int, steps: NDArray[np.int8], entered_from: NDArray[np.int64]) -> list[int]:
        """The words on the path that ends in a state, first to last."""
        words = []
        for frame in range(len(steps) - 1, 0, -1):
            step = int(steps[frame, state])
            if step == 1:
                state -= 1
            elif step >= 2:
                words.append(int(self._word_at[state]))
                state = int(entered_from[frame, step - 2])
        words.append(int(self._word_at[state]))
        return [word for word in reversed(words) if word >= 0]
