"""Conversion of checkpoints between Hugging Face's files and Megatron-LM's ``torch_dist``."""

DTYPES = ("bfloat16", "float16", "float32")
"""Names of dtypes of weights, which are torch's."""
LAYOUTS = ("fp8-blocks", "compressed-tensors", "modelopt", "gpt-oss")
"""Names of the layouts of quantized weights (``layouts/``)."""
TOKENS = tuple(range(1, 9))
"""Token ids by which both sides of a conversion are compared."""
SHARD_BYTES = 5 * 10**9
"""Largest size of a file that holds several tensors."""
