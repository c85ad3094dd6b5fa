"""Plan of a training run before it starts: memory, time, and which layouts to try."""
