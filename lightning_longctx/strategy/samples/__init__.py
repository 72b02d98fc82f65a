"""Which samples every rank reads, in which order, and where a resumed run goes on."""
