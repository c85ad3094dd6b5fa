"""The bugs in docs/research/upstream-notes.md are in the installed Megatron-LM.

A new version of it that lacks one, or moves a line that the page names, fails here.
"""

import argparse
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
import megatron.core
import megatron.training
from megatron.core.datasets import utils
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.cuda_graphs import (
    _CudagraphGlobalRecord,
    _CudagraphRecordNode,
    _GraphStatus,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.training import argument_utils, checkpointing, initialize
from megatron.training.arguments import add_megatron_arguments
from megatron.training.training import get_train_valid_test_num_samples

PAGE = (Path(__file__).parents[2] / "docs" / "research" / "upstream-notes.md").read_text(
    encoding="utf-8"
)
MEGATRON = Path(megatron.core.__file__).parents[1]
CITED = {
    "checkpointing.py:1338": "if not args.no_save_optim:",
    "training.py:1547": "args.train_iters = args.train_samples // args.global_batch_size",
    "filesystem_async.py:291": "assert isinstance(local_results_or_exc, list), type(",
    "layers.py:961": "use_expert_pgs = self.is_expert and (",
    "distrib_optimizer.py:961": "param_groups_map = {}",
    "optimizer_param_scheduler.py:390": "self.step(increment=num_steps)",
    "training.py:2594": "should_reset = not is_first_iteration",
    "training.py:3197": "and iteration == args.profile_step_end",
    "training.py:3682": "wait=max(args.profile_step_start - 1, 0),",
    "training.py:4382": "args.eval_iters = eval_iters[0]",
    "training.py:4423": "'{} validation{}'.format(key, suffix)",
    "training.py:4481": "args.train_iters // args.eval_interval",
    "training.py:4493": "for s in phase_transition_samples if s <= current_sample",
    "argument_utils.py:241": "inspect.getsource(src_cfg_class)",
    "config_logger.py:90": "return dataclasses.asdict(o)",
    "argument_utils.py:329": "kw_args['scaled_init_method'] = torch.nn.init.xavier_uniform_",
    "initialize.py:137": "if args.lazy_mpu_init:",
    "training.py:834": "+ forward_backward_expansion_factor",
    "training.py:1405": "initialize_rl_profiler(",
    "gpt_layer_specs.py:120": "AttnMaskType.causal",
    "schedules.py:27": "from megatron.core.transformer.moe.paged_stash import",
    "arguments.py:1741": "if not args.use_persistent_ckpt_worker:",
    "filesystem_async.py:65": "_results_queue = ctx.Manager().Queue()",
    "data_samplers.py:95": "DistributedSignalHandler(args.exit_signal).__enter__()",
    "arguments.py:99": "load_args_from_checkpoint(args, load_arg='pretrained_checkpoint')",
    "checkpointing.py:1664": "if getattr(args, 'ckpt_step', None):",
    "checkpointing.py:767": "TODO Handle non-empty directories",
    "checkpointing.py:882": "enable_cache=args.ckpt_assume_constant_structure",
    "checkpointing.py:1011": "open(tracker_filename, 'w')",
    "checkpointing.py:1697": "sys.exit()",
    "checkpointing.py:2254": "--ckpt-fully-parallel-save",
    "sft_dataset.py:37": "from datasets import load_dataset",
    "sft_dataset.py:74": "return self.num_samples",
    "sft_dataset.py:170": "loss_mask[labels == pad] = 0.0",
    "sft_dataset.py:174": "assert not self.config.create_attention_mask",
    "megatron_dataset.py:60": 'unique_identifiers["dataset_path"]',
    "transformer_block.py:59": "LayerNormImpl = FusedLayerNorm",
    "fused_layer_norm.py:68": "is not supported in FusedLayerNorm",
    "mla_qk_norm_config.py:148": "linear_q_proj_cls = self._mla_fused_linear_or_default(",
    "multi_latent_attention.py:739": "= gather_from_tensor_model_parallel_region(kv_combined)",
    "cuda_graphs.py:502": "def observing_save_for_backward(ctx, *tensors):",
    "cuda_graphs.py:617": "assert fwd_buffer_reuse_ref_count == 0",
    "cuda_graphs.py:734": "return inputs",
    "cuda_graphs.py:1380": "buf.copy_(buf_copy)",
    "cuda_graphs.py:2732": "make_graphed_callables(",
    "param_and_grad_buffer.py:4409": "self.buffer.param_to_param_group[item]",
    "param_and_grad_buffer.py:4751": "grad_data.mul_(scaling_factor)",
    "schedules.py:195": "assert out._base is None",
    "fused_mla_yarn_rope_apply.py:684": "cos, sin = ctx.saved_tensors",
    "token_dispatcher.py:317": "self.local_map.sum(dim=0).long().cpu()",
    "mcore_fsdp_adapter.py:561": "mesh = einops.rearrange(",
    "token_dispatcher.py:546": '_maybe_update_cuda_sync_point("before_permutation_1")',
    "token_dispatcher.py:950": "self.d2h_event.synchronize()",
    "transformer_config.py:2514": "or self.moe_router_padding_for_fp8",
    "transformer_layer.py:557": "CudaGraphModule.attn in self.config.cuda_graph_modules",
    "mlp.py:309": "= bias_swiglu_impl(",
    "hybrid_model.py:247": "self.rotary_pos_emb = RotaryEmbedding(",
    "multi_latent_attention.py:178": "self.softmax_scale = mscale * mscale",
    "multi_latent_attention.py:195": "beta_fast=self.config.beta_fast,",
    "gpt.py:120": "return get_gpt_layer_local_spec(",
    "mlp.py:354": "output += output_bias",
    "torch_norm.py:44": "assert (",
    "training.py:1778": "if args.freeze_all_layers:",
    "random.py:656": "torch.autograd.backward(outputs, args)",
    "random.py:693": "fp8 = FP8GlobalStateManager.is_fp8_enabled()",
    "distrib_optimizer.py:839": "assert len(steps) == 1",
    "language_module.py:261": ".zero_out_wgrad = True",
    "distrib_optimizer.py:2061": "def load_parameter_state_from_dp_reshardable",
}


def test_the_page_is_about_the_installed_version():
    assert PAGE.startswith(f"# Notes on Megatron-LM {version('megatron-core')}\n")


def test_every_cited_line_is_known():
    assert set(re.findall(r"(\w+\.py:\d+)", PAGE)) == CITED.keys()


@pytest.mark.parametrize("place", CITED)
def test_cited_lines_hold_what_the_page_says(place):
    name, _, number = place.partition(":")
    others = "dist_checkpointing", "distributed", "modelopt"  # with files of the same names
    (file,) = (path for path in MEGATRON.rglob(name) if path.parent.name not in others)
    assert CITED[place] in file.read_text(encoding="utf-8").splitlines()[int(number) - 1]


def test_help_fails():
    parser = argparse.ArgumentParser()
    add_megatron_arguments(parser)
    with pytest.raises(ValueError, match=r"unsupported format character '\)'"):
        parser.format_help()


def test_the_output_layer_needs_apex_for_a_fusion_that_is_the_default():
    source = inspect.getsource(layers.ColumnParallelLinear.__init__)
    assert "config.gradient_accumulation_fusion and not _grad_accum_fusion_available" in source


def test_there_is_no_makefile_for_the_dataset_helpers():
    folder = Path(utils.__file__).parent
    assert not (folder / "Makefile").exists() and list(folder.glob("helpers_cpp*.so"))


def test_override_is_imported_from_typing():
    for name in ("gpt", "hybrid"):
        source = (MEGATRON / "training" / "models" / f"{name}.py").read_text(encoding="utf-8")
        assert re.search(r"^from typing import .*\boverride\b", source, re.MULTILINE)


def test_core_imports_triton_wherever_it_is_imported():
    folder = MEGATRON / "core" / "transformer" / "moe"
    kernels = (folder / "ops" / "paged_stash.py").read_text(encoding="utf-8")
    assert re.search("^import triton$", kernels, re.MULTILINE)
    assert re.search(
        r"^from \S+\.ops\.paged_stash import", (folder / "paged_stash.py").read_text(), re.M
    )


@pytest.mark.slow
def test_without_triton_core_is_not_imported():
    code = "import sys; sys.modules['triton'] = None; import megatron.core"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ModuleNotFoundError: import of triton halted" in result.stderr


KILLED = """
import os, signal
import megatron_lowbit.megatron
from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

if __name__ == "__main__":
    print(get_write_results_queue()._manager._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_a_process_behind(tmp_path):
    """Its output goes to a file: the process keeps it open."""
    assert KILLED.strip() in PAGE.replace("  # ps still lists the printed process", "")
    script, output = tmp_path / "killed.py", tmp_path / "output"
    script.write_text(KILLED)
    with output.open("w") as stream:
        code = subprocess.run([sys.executable, script], stdout=stream, stderr=stream).returncode
    assert code == -signal.SIGKILL
    left = int(output.read_text().splitlines()[-1])
    time.sleep(1)
    os.kill(left, signal.SIGKILL)  # raises where there is no such process


def test_arguments_are_ignored():
    assert "scaling_factor" not in inspect.getsource(argument_utils.gpt_config_from_args)
    sources = [path.read_text(encoding="utf-8") for path in MEGATRON.rglob("*.py")]
    assert not any("args.openai_gelu" in source for source in sources)


def test_an_evaluation_interval_has_no_default():
    parser = argparse.ArgumentParser()
    add_megatron_arguments(parser)
    assert parser.get_default("eval_interval") is None
    assert "args.eval_interval" in inspect.getsource(get_train_valid_test_num_samples)


def test_parameters_are_loaded_with_gradients():
    source = inspect.getsource(DistributedOptimizer)
    method = "    def load_parameter_state_from_dp_reshardable"
    before = source.partition(method)[0].rstrip().splitlines()[-1]
    assert method in source and "no_grad" not in before


def test_warm_up_draws_random_numbers():
    source = (Path(initialize.__file__)).read_text(encoding="utf-8")
    warm_up = source.partition("def _warmup_jit_function")[2].partition("\ndef ")[0]
    assert "torch.rand(" in warm_up and "tensor_model_parallel" in warm_up


def test_local_attention_has_no_widths_of_keys_and_values():
    source = (MEGATRON / "core" / "transformer" / "multi_latent_attention.py").read_text()
    assert "k_channels=" in source
    module = inspect.getsource(inspect.getmodule(DotProductAttention))
    assert "k_channels" not in module


def test_a_window_replaces_the_mask():
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax

    source = inspect.getsource(FusedScaleMaskSoftmax.forward_torch_softmax)
    assert "mask = get_sliding_window_causal_mask(sq, sk, self.window_size)" in source


def test_biases_of_experts_are_marked_for_a_second_sum():
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    source = inspect.getsource(RowParallelLinear.__init__)
    assert 'setattr(self.bias, "sequence_parallel", self.sequence_parallel)' in source


def test_graphs_do_not_see_what_torch_saves():
    _CudagraphGlobalRecord._enable_saved_tensors_observer()
    try:
        x = torch.ones(4, requires_grad=True)
        y = torch.nn.functional.rms_norm(x, (4,))
    finally:
        _CudagraphGlobalRecord._disable_saved_tensors_observer()
    saved = [getattr(y.grad_fn, name) for name in dir(y.grad_fn) if name.startswith("_saved_")]
    assert any(one is x for one in saved)
    assert not hasattr(x, "cg_buffer_metadata")


def test_a_recorded_layer_ends_no_pipeline_stage():
    runner = argparse.Namespace(status=_GraphStatus.FWD_READY)
    output = _CudagraphRecordNode.apply(runner, torch.ones(4, requires_grad=True) * 2)
    with pytest.raises(AssertionError, match="free a view of another tensor"):
        deallocate_output_tensor(output, deallocate_pipeline_outputs=True)


def test_the_mesh_of_megatron_fsdp_has_no_pipeline_stages(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: group or 4)
    with pytest.raises(Exception, match="Shape mismatch, 4 != 2"):
        mcore_fsdp_adapter._get_dp_tp_mesh(SimpleNamespace(size=lambda: 2), 1)


def test_a_plan_of_an_asynchronous_save_takes_no_cache():
    with pytest.raises(TypeError, match="unexpected keyword argument 'enable_cache'"):
        inspect.signature(save_state_dict_async_plan).bind({}, None, enable_cache=False)


def test_an_empty_tracker_file_ends_the_next_start(tmp_path, capsys):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    with pytest.raises(SystemExit) as ended:
        checkpointing.read_metadata(str(tracker))
    assert ended.value.code is None and "Invalid metadata file" in capsys.readouterr().out
