"""The hybrid acoustic model: a network labels each frame with a tied state, and words are sequences of states."""
