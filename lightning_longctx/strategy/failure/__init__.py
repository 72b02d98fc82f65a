"""When a rank fails, hangs or is told to stop: all of them end, and say why."""
