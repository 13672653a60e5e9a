"""The engine's own step, recorded for every rank of a cluster that is not there."""
