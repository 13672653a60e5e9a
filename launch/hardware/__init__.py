"""Machines: what they are said to be, and what was measured of them."""
