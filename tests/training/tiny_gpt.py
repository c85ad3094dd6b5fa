"""A tiny GPT with megatron's DDP, optimizer and schedule: what the checkpoint tests train.

Run as a script it is one rank of a torchrun test; see ``main``.
"""

import argparse
import json
import resource
import shutil
from pathlib import Path

import torch

from megatron_lowbit.errors import UserError
from megatron_lowbit.training.checkpoint import load_checkpoint, save_checkpoint
from megatron_lowbit.training.distributed import (
    initialize_distributed,
    set_iteration_seed,
    set_step,
    shutdown,
)

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model

LAYERS, HIDDEN, VOCABULARY, SEQUENCE, BATCH, MICROBATCHES, SEED = 2, 32, 64, 16, 2, 2, 1234
SHAPE = {"num_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCABULARY}


def parallel_args(tensor: int = 1, pipeline: int = 1, seed: int = SEED) -> argparse.Namespace:
    return argparse.Namespace(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        distributed_timeout_minutes=1,
        seed=seed,
    )


class Training:
    """Model chunks, optimizer and schedule, freshly initialized from ``seed``."""

    def __init__(
        self, distributed_optimizer: bool, overlap: bool = False, bf16: bool = False, seed: int = 7
    ) -> None:
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        pipeline = parallel_state.get_pipeline_model_parallel_world_size()
        set_iteration_seed(seed, 0)
        torch.manual_seed(seed)
        self.config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            pipeline_dtype=torch.float32,
            gradient_accumulation_fusion=False,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
        )
        model = GPTModel(
            self.config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed_optimizer,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and distributed_optimizer,
        )
        model.cuda()  # nothing, on a CPU
        bare = Float16Module(self.config, model) if bf16 else model
        self.model = [DistributedDataParallel(self.config, ddp, bare)]
        adam = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=bf16,
            use_distributed_optimizer=distributed_optimizer,
        )
        self.optimizer = get_megatron_optimizer(adam, self.model)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=2,
            lr_decay_steps=20,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=20,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def step(self, iteration: int) -> float:
        """One optimizer step on data that follows from ``iteration``; the mean loss, or 0.0."""
        batches = []
        generator = torch.Generator().manual_seed(iteration)
        for _ in range(MICROBATCHES):
            tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
            batches.append(tokens.cuda())
        numbered = iter(enumerate(batches))
        position = torch.arange(SEQUENCE)[None].expand(BATCH, -1).cuda()
        mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE), 1).bool()[None, None].cuda()

        def forward(data, model):
            microbatch, tokens = next(data)
            set_step(SEED, iteration, microbatch)
            losses = model(tokens, position, mask, labels=tokens)
            return losses, lambda out: (out.mean(), out.mean().detach().clone())

        set_iteration_seed(SEED, iteration)
        self.model[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=numbered,
            model=self.model[0],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        self.optimizer.step()
        self.scheduler.step(1)
        return sum(loss.item() for loss in losses) / MICROBATCHES

    def train(self, first: int, last: int) -> list[float]:
        return [self.step(iteration) for iteration in range(first, last + 1)]

    def tensors(self) -> dict[str, dict]:
        """name -> {"param", "main", "exp_avg", "exp_avg_sq", "step", "partition_dim"}, on the CPU.

        "param" is the model's; "main" the optimizer's own copy or view, flat where distributed, as
        the moments are. Only parameters of which this rank's optimizer has a part.
        """
        (part,) = self.optimizer.chained_optimizers
        (model,) = unwrap_model(self.model)
        found = {}
        for name, param in model.named_parameters():
            if hasattr(part, "model_param_group_index_map"):
                group, order = part.model_param_group_index_map.get(param, (None, None))
                if group is None:
                    continue
                main = part.optimizer.param_groups[group]["params"][order]
            else:
                main = getattr(param, "main_param", param)
            found[name] = {
                "param": param.detach().clone().cpu(),
                "main": main.detach().clone().cpu(),
                **{key: value.clone().cpu() for key, value in part.optimizer.state[main].items()},
                "partition_dim": getattr(param, "partition_dim", -1),
            }
        return found

    def parameters(self) -> dict[str, torch.Tensor]:
        """name -> the model's parameter, on the CPU."""
        (model,) = unwrap_model(self.model)
        return {name: value.detach().clone().cpu() for name, value in model.named_parameters()}

    def save(self, directory: Path, iteration: int) -> Path:
        state = {"model": SHAPE, "consumed_samples": iteration * BATCH * MICROBATCHES}
        return save_checkpoint(
            directory, iteration, self.model, self.optimizer, self.scheduler, state
        )

    def load(self, directory: Path) -> dict:
        return load_checkpoint(directory, self.model, self.optimizer, self.scheduler, SHAPE)


def limit_file_size(size: int) -> None:
    """Let this process write no file longer than ``size`` bytes: a disk that fills up."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


def damaged_copy(directory: Path, copy: Path) -> None:
    """Copy a checkpoint directory, with one bit of the last shard turned.

    A rank whose parameters are replicas of another's has an empty one.
    """
    shutil.copytree(directory, copy)
    shard = sorted(file for file in copy.glob("iter_*/*.distcp") if file.stat().st_size)[-1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def main() -> None:
    """One rank: train, save, continue; reload and continue; then damage and a full disk.

    Writes RANK.json (what happened) and RANK.pt (this rank's parameters and moments at the save);
    where the directory holds a checkpoint "bf16", also the parameters that this gives.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--full-disk", type=int, default=1, help="rank")
    args = parser.parse_args()
    initialize_distributed(parallel_args(args.tensor, args.pipeline))
    rank = torch.distributed.get_rank()
    training = Training(not args.plain, args.overlap)
    training.train(1, 2)
    training.save(args.directory, 2)
    torch.save(training.tensors(), args.directory / f"{rank}.pt")
    report = {"continued": training.train(3, 5)}

    training = Training(not args.plain, args.overlap, seed=8)
    training.load(args.directory)
    report["resumed"] = training.train(3, 5)

    if (args.directory / "bf16").exists():
        training = Training(not args.plain, args.overlap, seed=8)
        training.load(args.directory / "bf16")
        torch.save(training.parameters(), args.directory / f"{rank} from bf16.pt")

    copy = args.directory / "damaged"
    if rank == 0:
        damaged_copy(args.directory, copy)
    torch.distributed.barrier()
    try:
        training.load(copy)
    except UserError as error:
        report["damaged"] = str(error)

    if rank == args.full_disk:
        limit_file_size(20_000)
    try:
        training.save(args.directory, 5)
    except UserError as error:
        report["error"] = str(error)
    (args.directory / f"{rank}.json").write_text(json.dumps(report))
    shutdown()


if __name__ == "__main__":
    main()
