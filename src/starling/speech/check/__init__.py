"""Checking a corpus: faults, duplicates, and overlap between training and test."""
