"""Published runs, and how the planner does on them."""
