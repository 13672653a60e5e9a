"""A run from its first step to its last: loop, records, saves and resumes."""
