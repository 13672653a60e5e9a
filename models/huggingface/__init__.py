"""Hugging Face checkpoints in and out: names, shapes and configurations of each family, as data."""
