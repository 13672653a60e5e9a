"""This engine's own step and memory in closed form, held to the simulation by tests/test_planner_simulation.py."""
