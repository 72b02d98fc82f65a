"""What a gradient is a mean over, how long it is, and what happens if it is not finite."""
