"""Starts, watches and ends learner processes; owns the store."""
