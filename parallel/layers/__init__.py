"""Layers that are cut over ranks, and where their gradients go."""
