"""Megatron-LM's ``tools/checkpoint/convert.py`` by ``lowbit-convert``, from Hugging Face.

    python tools/checkpoint/convert.py --model-type GPT --loader llama_mistral --saver core \\
        --load-dir Llama-3.2-1B --save-dir llama

The checkpoint is in ``torch_dist`` format, which any layout loads.
"""

from megatron_lowbit.command_line import CommandParser
from megatron_lowbit.conversion.command import main as convert
from megatron_lowbit.errors import exit_on_user_error, require


def main() -> int:
    """Convert the folder for any layout, whatever sizes the arguments name."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--model-type", choices=["GPT"], required=True)
    parser.add_argument("--loader", choices=["llama_mistral", "mixtral_hf"], required=True)
    parser.add_argument("--saver", choices=["core", "mcore"], required=True)
    parser.add_argument("--load-dir", required=True, help="folder with config.json and safetensors")
    parser.add_argument("--save-dir", required=True, help="folder of the checkpoint")
    parser.add_argument("--tokenizer-model", help="the same folder, whose tokenizer is carried")
    for size in ("tensor", "pipeline", "expert"):
        parser.add_argument(f"--target-{size}-parallel-size", type=int, help="any layout loads it")
    args = parser.parse_args()
    require(
        args.tokenizer_model in (None, args.load_dir),
        f"--tokenizer-model {args.tokenizer_model}: the tokenizer is taken from --load-dir",
    )
    return convert(["to-megatron", args.load_dir, args.save_dir])


if __name__ == "__main__":
    exit_on_user_error(main)
