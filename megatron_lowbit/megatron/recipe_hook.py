"""Give a model that Megatron-LM builds the precision that its arguments name.

For a script of one's own on ``megatron.training``, three lines::

    args = parse_and_validate_args(extra_args_provider=add_recipe_arguments)
    model_config = gpt_config_from_args(args)  # or hybrid_config_from_args
    use_recipe(model_config, args)

The recipe comes in through the configuration's public ``pre_wrap_hooks`` (and ``transformer_layer_
spec`` for MXNorm); nothing of Megatron-LM is replaced.
"""

from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import torch
from megatron.training.utils import is_rank0

from megatron_lowbit.arguments.from_checkpoint import check_loads
from megatron_lowbit.console import plain_console
from megatron_lowbit.errors import say
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.megatron import (
    allreduce_norm,
    compatibility,
    cuda_graphs,
    experts,
    linear,
    oscillation,
    quantized_parameters,
    workarounds,
)
from megatron_lowbit.megatron.amax_history import AmaxHistories
from megatron_lowbit.megatron.fallbacks import count_fallbacks
from megatron_lowbit.megatron.gemma_layers import use_gemma_layers
from megatron_lowbit.megatron.graph_weights import GraphWeights
from megatron_lowbit.megatron.grouped_experts import with_grouped_experts
from megatron_lowbit.megatron.layer_plan import LayerPlan, layer_of
from megatron_lowbit.megatron.layer_state import LayerState, layer_states
from megatron_lowbit.megatron.load_source import LoadSource
from megatron_lowbit.megatron.mxnorm import mxnorm_of, use_mxnorm_spec
from megatron_lowbit.megatron.quantization_log import log_quantization_errors
from megatron_lowbit.megatron.rank_errors import (
    gather_from_ranks,
    raise_on_all_ranks,
    say_on_rank_0,
)
from megatron_lowbit.megatron.resumed_schedule import follow_schedule_arguments
from megatron_lowbit.megatron.run_record import record_recipe
from megatron_lowbit.megatron.specs import change_specs
from megatron_lowbit.megatron.start_up import describe
from megatron_lowbit.megatron.steps import steps_of
from megatron_lowbit.recipes import Layer, Progress, Recipe, load_recipes


def use_recipe(model_config: Any, args: Namespace) -> None:
    """Let the model of a configuration compute as ``--precision-recipe`` says.

    Without that argument this changes nothing but the layers that Megatron-LM lacks or gets wrong.

    Args:
        model_config: Megatron-LM's GPTModelConfig or HybridModelConfig.
        args: parsed by Megatron-LM, with the arguments of ``add_recipe_arguments``.

    Raises:
        UserError: the recipe does not exist, or does not fit the other arguments.
    """
    workarounds.use_prebuilt_dataset_helpers()
    follow_schedule_arguments()
    record_recipe(args)
    if args.gradient_accumulation_fusion:
        workarounds.fuse_gradient_accumulation()
    recipe = None
    if args.precision_recipe is not None:
        recipe = load_recipes(args.precision_recipe, args.recipe_set)
    compatibility.check(args, recipe)
    check_loads(args)
    use_gemma_layers(model_config, args)
    if args.transformer_impl == "local":
        workarounds.use_torch_rms_norm()
        if args.layernorm_zero_centered_gamma:
            workarounds.use_zero_centered_norms()
        if args.num_experts is not None and args.add_bias_linear:
            model_config.pre_wrap_hooks.append(workarounds.train_biases_of_experts)
    if args.multi_latent_attention:
        workarounds.use_local_latent_attention()
    if recipe is None:
        return
    if args.mxnorm:
        use_mxnorm_spec(model_config)
    if args.moe_grouped_gemm and args.transformer_impl == "local":
        change_specs(model_config, with_grouped_experts)
    hook = RecipeHook(recipe, args)
    model_config.pre_wrap_hooks.append(hook)
    model_config.post_wrap_hooks.append(hook.wrap)


class RecipeHook:
    """A ``pre_wrap_hook``: takes over the linear layers of a model's chunks."""

    def __init__(self, recipe: Recipe, args: Namespace) -> None:
        self.recipe, self.args = recipe, args
        self.graphs: cuda_graphs.Graphs | None = None
        self.parameters: quantized_parameters.QuantizedParameters | None = None

    def __call__(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Take over chunks that are not yet wrapped; return them."""
        args = self.args
        with raise_on_all_ranks("read the checkpoint in", args.load or ""):
            source = LoadSource.of(args)
        # A layer that does not fit may be on one rank alone.
        with raise_on_all_ranks("prepare the kernels of the recipe"):
            self.take_over(chunks, source)
        layers = quantizable_layers(chunks)
        self.check(layers)
        if args.fused_allreduce_norm:
            allreduce_norm.fuse_all_reduces(chunks, args)
        steps = steps_of(args, chunks)
        steps.listeners.append(self._begin_step)
        if args.cuda_graph_impl != "none":
            self.graphs = cuda_graphs.Graphs(chunks, self.states, args)
            steps.before_pass.append(self.graphs.begin_pass)
        for chunk in chunks:
            histories = AmaxHistories(list(layer_states([chunk])), source and source.tensors)
            chunk.amax_histories = histories
            steps.listeners.append(histories.begin_step)
        if self.graphs is not None:  # behind the histories, in which weights record amaxes
            steps.listeners.append(GraphWeights(chunks, args).begin_step)
        if args.quantized_param_gather:
            self.parameters = quantized_parameters.QuantizedParameters(args, chunks)
        if self.recipe.oscillation:
            steps.listeners.append(self._reset_oscillations(chunks, source).begin_step)
        # All ranks count together, also where this one's layers have no fallback, or none yet.
        if any(precision.falls_back for precision in self.recipe.precisions()):
            count_fallbacks(args, chunks)
        log_quantization_errors(args, chunks)
        if is_rank0():
            self.show(layers, chunks)
        return chunks

    def wrap(self, wrapped: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Store weights as codes if the arguments say so; a ``post_wrap_hook``."""
        return wrapped if self.parameters is None else self.parameters.wrap(wrapped)

    def take_over(self, chunks: list[torch.nn.Module], source: LoadSource | None) -> None:
        """Give the linear layers of this rank the precision with which the run begins."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.engine = select_engine(device, self.args.quantization_engine)
        self.start = source.iteration if source else 0
        self.current = self.recipe.at(self._progress(self.start))
        self.states = [state for chunk in chunks for state in self._take_over(chunk)]
        if self.args.quantized_param_gather:
            quantized_parameters.check_states(self.states)
        if source:
            source.check_histories(self.states)

    def check(self, layers: list[Layer]) -> None:
        """Raise UserError where the recipe does not fit the whole model's layers."""
        self.recipe.check_matchers(layers)
        if self.args.quantized_param_gather:
            quantized_parameters.check_recipe(self.recipe, layers)
        if self.args.mxnorm:
            self.recipe.check_mxnorm(layers, self.args.hidden_size)

    def show(
        self,
        layers: list[Layer],
        chunks: list[torch.nn.Module],
        capability: tuple[int, int] | None = None,
    ) -> None:
        """Print which layers of the whole model have which precision, and how it is computed.

        ``capability``: compute capability of the GPU that is described; None for this machine's.
        """
        console = plain_console(130)
        for line in describe(self.recipe, self.engine, layers, chunks, self.args, capability):
            console.print(line)
        if self.recipe.switches:
            say(f"in force from iteration {self.start} on: recipe {self.current.name}")

    def _take_over(self, chunk: torch.nn.Module) -> list[LayerState]:
        kind: Any = linear
        modules = linear.local_linears(chunk)
        if self.args.transformer_impl == "transformer_engine":
            from megatron_lowbit.megatron import transformer_engine_layers as kind

            modules = kind.te_linears(chunk)
        states, first_expert = [], experts.first_local(chunk.config)
        for name, module in modules.items():
            if (layer := layer_of(chunk, name, first_expert)) is not None:
                plan = LayerPlan(
                    layer,
                    self.current.precision_for(layer),
                    self.engine,
                    accumulate_main_grad=chunk.config.gradient_accumulation_fusion,
                    norm=mxnorm_of(self.args),
                    evaluates=self.args.eval_precision == "recipe",
                )
                states.append(kind.take_over(module, plan))
        return states

    def _reset_oscillations(
        self, chunks: list[torch.nn.Module], source: LoadSource | None
    ) -> oscillation.OscillationResets:
        """Return the resets of this rank's weights, which the first chunk's checkpoints include."""
        layers = [m for chunk in chunks for m in chunk.modules() if hasattr(m, "layer_state")]
        resets = oscillation.OscillationResets(
            layers, self.recipe.oscillation, self._iterations(), source and source.tensors
        )
        chunks[0].oscillation_resets = resets
        return resets

    def _iterations(self) -> int:
        args = self.args
        return args.train_iters or (args.train_samples or 0) // args.global_batch_size or 1

    def _progress(self, iteration: int) -> Progress:
        args = self.args
        samples = getattr(args, "consumed_train_samples", 0) or iteration * args.global_batch_size
        return Progress(iteration, samples * args.seq_length, iteration / self._iterations())

    def _begin_step(self, iteration: int, training: bool) -> None:
        """Quantize weights anew, for they have changed, and switch where the recipe says so."""
        for state in self.states:
            state.forget_weight()
        if not training:
            return
        current = self.recipe.at(self._progress(iteration))
        switched = current != self.current
        if switched:
            for state in self.states:
                state.set_precision(current.precision_for(state.plan.layer))
            self.current = current
            say_on_rank_0(f"iteration {iteration}: recipe {current.name}")
        if self.graphs is not None:
            self.graphs.begin_step(switched)


def quantizable_layers(chunks: list[torch.nn.Module]) -> list[Layer]:
    """Return all linear layers of the model that a recipe can reach, in the model's order."""
    mine = [state.plan.layer for state in layer_states(chunks)]
    return in_order(layer for layers in gather_from_ranks(mine) for layer in layers)


def in_order(layers: Iterable[Layer]) -> list[Layer]:
    """Return layers sorted by block and path, each path once."""
    unique = {layer.path: layer for layer in layers}
    return sorted(unique.values(), key=lambda layer: (layer.block, layer.path))
