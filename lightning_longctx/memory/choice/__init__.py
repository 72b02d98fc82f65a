"""Which plan is the fastest that fits: measured, solved for, shown."""
