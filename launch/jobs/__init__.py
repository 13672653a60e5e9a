"""Scripts for clusters."""
