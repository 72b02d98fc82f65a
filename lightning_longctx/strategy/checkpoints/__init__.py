"""What a checkpoint holds, how it is written whole or not at all, and how a run goes on from it."""
