"""What every layout did, recorded, and compared with what it does now: `python -m tests.frozen`."""
