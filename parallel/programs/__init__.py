"""What ranks do, as data: programs, their proof, and smaller ones that fail alike."""
