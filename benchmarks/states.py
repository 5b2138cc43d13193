"""The cost of tied states in the papers' network: parameters, and the time of a gradient. `python -m
benchmarks.states`."""

import time

import torch

from starling.speech.models import build_model, count_parameters, model_config
from starling.speech.training.workload import FrameBatch, frame_loss

SEQUENCES, FRAMES, INPUTS, REPEATS = 16, 21, 260, 3


def main() -> None:
    """Print a line for each number of states: the best of a few gradients of a small mini-batch, on one thread."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SEQUENCES, FRAMES, INPUTS, generator=generator)
    lengths = torch.full((SEQUENCES,), FRAMES)
    for number in (100, 1_000, 9_000, 32_000):
        model = build_model(model_config(name="blstm-hybrid", preset="ibm"), INPUTS, number, seed=1)
        states = torch.randint(number, (SEQUENCES, FRAMES), generator=generator)
        batch = FrameBatch(features, lengths, 0.0, ("",) * SEQUENCES, states)
        seconds = []
        for _ in range(REPEATS):
            began = time.process_time()
            model.zero_grad()
            frame_loss(model, batch).backward()
            seconds.append(time.process_time() - began)
        count = count_parameters(model)
        print(f"{number} states: {count:,} parameters, {4 * count / 1e6:.1f} MB, {min(seconds):.2f} s of CPU")


if __name__ == "__main__":
    main()
