"""Preparation of sets in stages, which run once each, in any process and any order."""
