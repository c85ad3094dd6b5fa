"""A conversion needs memory for two of the largest file, however large the model is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_llama import write_llama

SIZES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16000,
}  # fmt: skip
SHARD_BYTES = 40_000_000
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def peaks(tmp_path_factory) -> dict:
    """Bytes by direction, of the largest file as "shard", and of the model as "model"."""
    folder = tmp_path_factory.mktemp("memory")
    write_llama(folder / "tiny")
    largest = write_llama(folder / "source", SIZES, SHARD_BYTES, torch.bfloat16)
    command = [sys.executable, __file__, str(folder)]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    model = sum(path.stat().st_size for path in (folder / "source").glob("*.safetensors"))
    return json.loads(result.stdout.splitlines()[-1]) | {"shard": largest, "model": model}


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["to-megatron", "to-hugging-face", "quantize", "dequantize"])
def test_the_peak_is_two_files_at_most(peaks, direction):
    """Above what the interpreter had before; mapped pages of files count."""
    assert peaks["model"] > 130_000_000
    assert peaks["shard"] < 45_000_000
    assert peaks[direction] <= 2 * peaks["shard"], peaks


def worker(folder: Path) -> None:
    """Print the peaks, after a small model has loaded what is loaded once."""
    from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
    from megatron_lowbit.conversion.quantized import QuantizedAs

    peaks_of = {}
    for source in ("tiny", "source"):
        there, quantized = folder / f"{source} there", folder / f"{source} quantized"
        peaks_of = {
            "to-megatron": peak(to_megatron, folder / source, there),
            "to-hugging-face": peak(
                to_hugging_face, there, folder / f"{source} back", None, None, SHARD_BYTES
            ),
            "quantize": peak(
                to_hugging_face, there, quantized, None, None, SHARD_BYTES, False,
                QuantizedAs("compressed-tensors", ["qat-nvfp4"]),
            ),
            "dequantize": peak(to_megatron, quantized, folder / f"{source} dequantized"),
        }  # fmt: skip
    print(json.dumps(peaks_of))


def peak(convert, *arguments) -> int:
    """Return the bytes that a call had resident at once above what was before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    convert(*arguments)
    return status("VmHWM") - before


def status(name: str) -> int:
    """Return the resident memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
