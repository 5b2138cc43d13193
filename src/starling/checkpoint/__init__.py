"""Checkpoints, which are published atomically, verified by SHA-256 and resumable. They consist of safetensors and JSON
files, without pickle."""
