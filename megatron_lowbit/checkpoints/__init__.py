"""Files of a checkpoint: verification, safe reading, inspection."""
