"""Turns audio of any length into text with times: segments, words, subtitles."""
