"""Data sources, packing and the loader."""
