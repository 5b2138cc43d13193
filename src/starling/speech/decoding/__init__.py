"""From log-probabilities to text: greedy decoding, and a beam search with an n-gram language model."""
