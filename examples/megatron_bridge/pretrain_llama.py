"""Pretrain a small Llama by Megatron-Bridge under a recipe, for 20 steps on made-up tokens.

torchrun --nproc-per-node 1 examples/megatron_bridge/pretrain_llama.py lowbit_nvfp4
"""

import argparse


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("precision", help="bf16_mixed, or lowbit_ and the name of a recipe")
    precision = parser.parse_args().precision

    # After the help, which needs none of them.
    from megatron.bridge import AutoBridge
    from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from transformers import LlamaConfig

    from megatron_lowbit.integrations.bridge import LowbitCallback

    llama = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=32000, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config = vanilla_gpt_pretrain_config()
    config.model = AutoBridge.from_hf_config(llama).to_megatron_provider(load_weights=False)
    config.model.gradient_accumulation_fusion = False  # quantizer factories do not have it
    config.model.seq_length = config.dataset.seq_length = 1024
    config.tokenizer.vocab_size = llama.vocab_size
    config.train.train_iters, config.scheduler.lr_warmup_iters = 20, 2
    config.train.global_batch_size = config.train.micro_batch_size = 4
    config.validation.eval_iters, config.logger.log_interval = 0, 1
    config.checkpoint.save = None
    config.mixed_precision = precision
    pretrain(config, forward_step, callbacks=[LowbitCallback()])


if __name__ == "__main__":
    main()
