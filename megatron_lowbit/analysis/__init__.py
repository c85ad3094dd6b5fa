"""Analysis of runs: loss curves, quantization error, spikes, comparisons, studies of many runs."""
