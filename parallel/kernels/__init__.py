"""The arithmetic of layers on one device, and the choice of it."""
