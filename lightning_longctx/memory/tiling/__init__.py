"""Parts that treat every token alone, some tokens at a time."""
