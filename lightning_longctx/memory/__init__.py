"""What backward keeps: policies, what they cost and gain, and what carries them out."""
