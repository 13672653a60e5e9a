"""A cluster's step priced on hardware: time, memory, and pictures of both."""
