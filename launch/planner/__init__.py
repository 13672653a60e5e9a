"""The planner: what hardware can do, what a layout needs and how long its step takes, in closed form. No torch."""
