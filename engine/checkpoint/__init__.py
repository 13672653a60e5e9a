"""Sharded checkpoints that any topology reads: what is written, how, and when it counts."""
