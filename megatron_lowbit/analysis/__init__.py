"""What a run did: loss curves, quantization error, spikes. Reads files, trains nothing."""
