"""Recipes through Transformer Engine's layers: its own kernels, or this project's inside them."""
