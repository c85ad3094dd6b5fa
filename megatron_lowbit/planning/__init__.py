"""What a training run will take, before it is started: memory, time, and which layouts to try."""
