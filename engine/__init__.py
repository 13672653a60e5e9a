"""Run configuration, data, optimizer step, trainer and metrics."""
