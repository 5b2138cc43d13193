"""Checkpoints: published atomically, verified by SHA-256, resumable; safetensors and JSON, no pickle."""
