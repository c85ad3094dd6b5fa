"""Linear layers of Megatron-LM under a recipe, and layers that Megatron-LM lacks."""
