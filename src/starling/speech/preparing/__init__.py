"""Preparing a set in stages that can be run in any process, in any order, and not twice."""
