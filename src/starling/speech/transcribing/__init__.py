"""Converts audio of any length to text with times, such as segments, words and subtitles."""
