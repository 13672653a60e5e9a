"""What a run does when something goes wrong: signals, dead and silent ranks, numbers that are not finite, resuming."""
