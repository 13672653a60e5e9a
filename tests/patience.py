"""How long tests wait. What is promised is never a time: that another machine is busier must not make a test fail."""

PATIENCE_SECONDS = 600
"""For what must come, before a test gives up; pytest itself gives up later."""

NEVER_SECONDS = 100_000
"""A timeout, or a sleep, that cannot be what ended a run that did end."""
