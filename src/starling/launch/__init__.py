"""Code that starts, watches and ends learner processes, and the store and messages through which they communicate."""
