"""A run of stock Megatron-LM, in a process that imports nothing of this package.

Without CUDA a mode of torch takes what is for a GPU on the CPU. There, too, one generator draws
what a GPU's generator would; what draws from the host's generator there must not draw from it here.
"""

import os
import sys
import types
import typing
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

if not hasattr(typing, "override"):  # Python 3.11
    typing.override = lambda method: method


class OnCPU(TorchFunctionMode):
    """Mode in which CUDA as a device is the CPU, and tensors have the names of CUDA's types."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Call a function of torch with other devices."""
        kwargs = {name: self._moved(value) for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.cuda:
            return args[0]
        answer = function(*map(self._moved, args), **kwargs)
        if function is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.")
        return answer

    @staticmethod
    def _moved(value):
        is_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
        return torch.device("cpu") if is_cuda else value


def pretend_cuda() -> None:
    """Replace functions of torch.cuda, for which a mode has no hook."""
    cuda = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.default_generators = {torch.device("cpu"): torch.default_generator}
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.memory_stats = lambda *_, **__: dict.fromkeys(("allocated_bytes.all.current",), 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        major=0, minor=0, multi_processor_count=1, total_memory=0
    )
    cuda.get_device_capability = lambda *_: (0, 0)
    cuda.Stream = cuda.Event = MagicMock
    cuda.current_stream = cuda.default_stream = cuda.stream = lambda *_: MagicMock()
    init = DataLoader.__init__
    DataLoader.__init__ = lambda self, *args, **settings: init(
        self, *args, **settings | {"generator": torch.Generator(), "pin_memory": False}
    )


def forward_step(data, model):
    """Run one microbatch like Megatron-LM's own script without parallelism."""
    batch = next(data)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss(output):
        mask = batch["loss_mask"].view(-1)
        total = torch.sum(output.view(-1) * mask)
        tokens = mask.sum().to(torch.int)
        return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}

    return output, loss


def main() -> None:
    """Train with the arguments of the command line."""
    from megatron.core.datasets import utils
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.core.enums import ModelType
    from megatron.training import (
        get_args,
        get_tensorboard_writer,
        get_tokenizer,
        initialize,
        pretrain,
    )
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    utils.compile_helpers = lambda: None  # the package has them compiled, without their Makefile
    if isinstance(torch.cuda.current_device(), torch.device):
        initialize._warmup_jit_function = lambda **_: None  # draws random numbers

    def datasets(samples, vp_stage=None):
        args = get_args()
        config = GPTDatasetConfig(
            random_seed=args.seed, sequence_length=args.seq_length, split=args.split,
            tokenizer=get_tokenizer(), reset_position_ids=False, reset_attention_mask=False,
            eod_mask_loss=False, create_attention_mask=False,
        )  # fmt: skip
        return BlendedMegatronDatasetBuilder(
            MockGPTDataset, list(samples), lambda: True, config
        ).build()

    datasets.is_distributed = True
    # A single process needs the rendezvous of a launcher, too. The store takes a free port itself.
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)
    get_tensorboard_writer().close()  # its thread may not have written the last validation
    assert not [name for name in sys.modules if name.startswith("megatron_lowbit")]


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        pretend_cuda()
        with OnCPU():
            main()
