"""Checkpoints: written aside and renamed, checked by SHA-256, resumable; safetensors and JSON, no pickle."""
