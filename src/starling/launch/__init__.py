"""Starts, watches and ends learner processes; owns the store and the messages between processes."""
