"""Checks a corpus for unusable utterances, duplicates, and overlap between training and test sets."""
