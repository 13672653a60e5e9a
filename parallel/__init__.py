"""Topology, worlds, tensor-parallel layers, pipeline schedules and ZeRO."""
