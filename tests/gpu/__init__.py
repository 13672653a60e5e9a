"""What only a GPU can show, as tests and as checks of a machine: `python -m tests.gpu`."""
