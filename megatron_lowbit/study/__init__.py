"""Studies: grids of runs and seeds, their comparison, and the sensitivity of a model's layers."""
