"""Train a Hugging Face model with a recipe: one line more than without.

    python examples/hugging_face_trainer.py --output_dir runs/trainer --max_steps 30 --use_cpu

The model is a tiny Llama with random weights, the data are sequences that repeat a pattern: nothing
is downloaded. The arguments are the fields of TrainingArguments.
"""

import torch
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)

from megatron_lowbit import convert


def main() -> None:
    """Train as the command line says."""
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
    )
    convert(model, "nvfp4")  # the first and the last of the four blocks stay as they are
    tokens = (torch.randint(64, (512, 1)) + 5 * torch.arange(32)) % 64
    data = [{"input_ids": row, "labels": row} for row in tokens]
    Trainer(model, args, train_dataset=data).train(args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
