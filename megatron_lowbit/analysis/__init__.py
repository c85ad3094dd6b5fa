"""What runs did: loss curves, quantization error, spikes, comparisons, and studies of many runs."""
