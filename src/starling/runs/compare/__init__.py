"""Comparisons: a grid of runs, each arm at its own best learning rate, and what the seeds show."""
