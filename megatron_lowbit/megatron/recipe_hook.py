"""Give a model that Megatron-LM builds the precision that its arguments name.

For a script of one's own on ``megatron.training``, three lines::

    args = parse_and_validate_args(extra_args_provider=add_recipe_arguments)
    model_config = gpt_config_from_args(args)  # or hybrid_config_from_args
    use_recipe(model_config, args)

The recipe comes in through public attributes of the configuration: ``pre_wrap_hooks``,
``post_wrap_hooks`` and, for other layers, its specs. Names of Megatron-LM that are replaced are
listed in CONTRIBUTING.md.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.utils import is_rank0
from rich.table import Table

from megatron_lowbit.arguments import compatibility
from megatron_lowbit.arguments.from_checkpoint import check_loads
from megatron_lowbit.arguments.parser import LOSSES
from megatron_lowbit.console import plain_console
from megatron_lowbit.kernels.engine import Engine
from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.megatron.distillation import distill
from megatron_lowbit.megatron.features import ExtraTensors, Feature
from megatron_lowbit.megatron.features.allreduce_norm import FusedAllReduceNorm
from megatron_lowbit.megatron.features.amax_history import AmaxHistories
from megatron_lowbit.megatron.features.cuda_graphs import CudaGraphs
from megatron_lowbit.megatron.features.embedding import EmbeddingGradients
from megatron_lowbit.megatron.features.expert_counts import ExpertCounts
from megatron_lowbit.megatron.features.expert_dispatch import ExpertDispatch
from megatron_lowbit.megatron.features.logs import Fallbacks, QuantizationLog
from megatron_lowbit.megatron.features.oscillation import OscillationResets
from megatron_lowbit.megatron.features.quantized_parameters import QuantizedParameters
from megatron_lowbit.megatron.layers import local
from megatron_lowbit.megatron.layers.experts import with_grouped_experts
from megatron_lowbit.megatron.layers.hybrid import use_best_scan, use_local_stack
from megatron_lowbit.megatron.layers.mxnorm import MXNormLayers, mxnorm_of, with_mxnorm
from megatron_lowbit.megatron.layers.specs import (
    change_specs,
    use_gemma_layers,
    with_direct_queries,
    with_l2_norms,
)
from megatron_lowbit.megatron.layers.state import (
    LayerPlan,
    LayerState,
    first_local_expert,
    layer_of,
    weights_of,
)
from megatron_lowbit.megatron.loss import use_loss
from megatron_lowbit.megatron.run import workarounds
from megatron_lowbit.megatron.run.errors import gather_from_ranks, raise_on_all_ranks, say_on_rank_0
from megatron_lowbit.megatron.run.load_source import LoadSource
from megatron_lowbit.megatron.run.records import record_recipe
from megatron_lowbit.megatron.run.resumed_schedule import follow_schedule_arguments
from megatron_lowbit.megatron.run.steps import run_after_backward, steps_of
from megatron_lowbit.numerics.precision import GemmPrecision, LinearPrecision
from megatron_lowbit.recipes import Layer, Progress, Recipe, load_recipes, precision_table

Weight = tuple[tuple[int, ...], LinearPrecision]
"""Shape of a weight on a rank, and its precision."""


def model_config_of(args: Namespace) -> Any:
    """Return Megatron-LM's configuration of the arguments' model, with its recipe as a hook.

    Raises UserError for a recipe or another argument that does not fit the others.
    """
    if args.hybrid_layer_pattern is None:
        model_config = gpt_config_from_args(args)
    else:
        model_config = hybrid_config_from_args(args)
        use_local_stack(model_config)
        say_on_rank_0(f"Mamba scan: {use_best_scan()}")
    for line in workarounds.apply_ignored_arguments(model_config, args):
        say_on_rank_0(line)
    use_recipe(model_config, args)
    return model_config


def recipe_of(args: Namespace) -> Recipe | None:
    """Load the recipe that the arguments name; None without ``--precision-recipe``."""
    if args.precision_recipe is None:
        return None
    return load_recipes(args.precision_recipe, args.recipe_set)


def use_recipe(model_config: Any, args: Namespace) -> None:
    """Let the model of a configuration compute as ``--precision-recipe`` says.

    Without that argument this changes nothing but the loss of ``--cross-entropy-fusion-impl`` and
    the layers that Megatron-LM lacks or gets wrong. ``model_config`` is Megatron-LM's
    GPTModelConfig or HybridModelConfig; ``args`` are parsed by Megatron-LM, with the arguments of
    ``add_recipe_arguments``. Raises UserError for a recipe that does not exist, or does not fit the
    other arguments.
    """
    workarounds.use_prebuilt_dataset_helpers()
    follow_schedule_arguments()
    recipe = recipe_of(args)
    record_recipe(args)
    if not args.async_save:
        workarounds.save_without_another_process()
    if args.gradient_accumulation_fusion:
        workarounds.fuse_gradient_accumulation()
    if args.num_experts is not None:
        workarounds.load_optimizers_of_other_expert_layouts()
    compatibility.check(args, recipe)
    check_loads(args)
    if args.cross_entropy_fusion_impl in LOSSES:
        workarounds.hide_loss_from_second_parse()
        use_loss(model_config, args.cross_entropy_fusion_impl)
    if args.distill_from is not None:
        distill(model_config, args)
    use_gemma_layers(model_config, args)
    if args.transformer_impl == "local":
        workarounds.use_torch_rms_norm()
        if args.layernorm_zero_centered_gamma:
            workarounds.use_zero_centered_norms()
        if args.num_experts is not None and args.add_bias_linear:
            model_config.pre_wrap_hooks.append(workarounds.train_biases_of_experts)
        if args.multi_latent_attention and args.q_lora_rank is None:
            change_specs(model_config, with_direct_queries)
        if args.qk_l2_norm:  # Megatron-LM omits them in models without experts.
            change_specs(model_config, with_l2_norms)
    if args.multi_latent_attention:
        workarounds.use_local_latent_attention()
    if args.recompute_granularity == "selective":
        workarounds.recompute_without_transformer_engine()
    if recipe is None:
        return
    if args.mxnorm:
        change_specs(model_config, with_mxnorm)
    if args.moe_grouped_gemm and args.transformer_impl == "local":
        change_specs(model_config, with_grouped_experts)
    hook = RecipeHook(recipe, args)
    model_config.pre_wrap_hooks.append(hook)
    model_config.post_wrap_hooks.append(hook.wrap)


class Switches(Feature):
    """Precisions of a step: weights are quantized again, and a recipe switches where it says so."""

    def begin_step(self, iteration: int, training: bool) -> None:
        """Discard the quantized weights of the last step, and apply switches."""
        run = self.run
        for state in run.states:
            state.forget_weight()
        current = run.recipe.at(run.progress(iteration)) if training else run.current
        if current != run.current:
            for state in run.states:
                state.set_precision(current.precision_for(state.plan.layer))
            run.current = current
            say_on_rank_0(f"iteration {iteration}: recipe {current.name}")

    def describe(self) -> Iterator[str]:
        """Yield the recipe with which the run begins, if it has several, and unreached switches."""
        run, args = self.run, self.run.args
        if run.recipe.switches:
            yield f"in force from iteration {run.start} on: recipe {run.current.name}"
        if args.step_batch_size_schedule:
            return  # The number of iterations is not known.
        last, tokens = run.iterations - 1, args.global_batch_size * args.seq_length
        end = Progress(last, last * tokens, last / run.iterations)
        for switch in run.recipe.switches:
            if not switch.reached(end):
                length = f"{run.iterations:,} iterations of {tokens:,} tokens"
                yield f"switch {switch.name} is not reached: the run has {length}"


# In the order in which they begin a step: weights are reset before they are quantized for graphs,
# and record amaxes then, after the histories of the last step are complete.
_FEATURES = (
    Switches, AmaxHistories, OscillationResets, CudaGraphs, QuantizedParameters, Fallbacks,
    QuantizationLog, FusedAllReduceNorm, MXNormLayers, EmbeddingGradients,
    ExpertCounts, ExpertDispatch,
)  # fmt: skip


class RecipeHook:
    """A ``pre_wrap_hook``: takes over the linear layers of a model's chunks.

    Attributes:
        features: the features of training that the recipe and the arguments ask for.
        chunks, states: this rank's part of the model, and the states of its linear layers.
        source: the checkpoint to load, or None.
        start, current: iteration with which the run begins, and the recipe in force.
    """

    def __init__(self, recipe: Recipe, args: Namespace) -> None:
        self.recipe, self.args = recipe, args
        self.features: list[Feature] = [
            feature(self) for feature in _FEATURES if feature.is_on(args, recipe)
        ]

    def __call__(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Take over chunks that are not yet wrapped; return them."""
        with raise_on_all_ranks("read the checkpoint in", self.args.load or ""):
            source = LoadSource.of(self.args)
        # A layer that does not fit may be on one rank only.
        with raise_on_all_ranks("prepare the kernels of the recipe"):
            self.take_over(chunks, source)
        mine = [state.plan.layer for state in self.states], weight_shapes(chunks)
        layers_of, shapes_of = zip(*gather_from_ranks(mine), strict=True)
        layers = in_order(layer for layers in layers_of for layer in layers)
        self.check(layers)
        steps = steps_of(self.args, chunks)
        steps.listeners.append(self._begin_step)
        saved = source and source.tensors
        for feature in self.features:
            feature.install()
            if type(feature).begin_pass is not Feature.begin_pass:
                steps.before_pass.append(feature.begin_pass)
            for chunk in chunks if feature.submodule else ():
                setattr(chunk, feature.submodule, ExtraTensors(feature, chunk, saved))
        if is_rank0():
            self.show(layers, chain.from_iterable(shapes_of))
        return chunks

    def take_over(self, chunks: list[torch.nn.Module], source: LoadSource | None) -> None:
        """Give the linear layers of this rank the precision with which the run begins."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.engine = select_engine(device, self.args.quantization_engine)
        self.chunks, self.source = chunks, source
        self.start = source.iteration if source else 0
        self.current = self.recipe.at(self.progress(self.start))
        self.states = [state for chunk in chunks for state in self._take_over(chunk)]
        for feature in self.features:
            feature.check_rank()

    def _take_over(self, chunk: torch.nn.Module) -> Iterator[LayerState]:
        layers: Any = local
        if self.args.transformer_impl == "transformer_engine":
            from megatron_lowbit.megatron.layers import transformer_engine as layers

        first_expert = first_local_expert(chunk.config)
        for name, module in layers.linears_of(chunk).items():
            if (layer := layer_of(chunk, name, first_expert)) is not None:
                yield layers.take_over(module, self._plan(chunk, layer))
        if self.args.transformer_impl == "transformer_engine":
            layers.fuse_mlps(chunk)
            layers.fuse_norms(chunk)
        if self.recipe.takes_output_layer and chunk.post_process:
            # Under both implementations this layer is Megatron-LM's own.
            layer = Layer.output(chunk.config.num_layers)
            yield local.take_over(chunk.output_layer, self._plan(chunk, layer))

    def _plan(self, chunk: torch.nn.Module, layer: Layer) -> LayerPlan:
        return LayerPlan(
            layer,
            self.current.precision_for(layer),
            self.engine,
            accumulate_main_grad=chunk.config.gradient_accumulation_fusion,
            norm=mxnorm_of(self.args),
            evaluates=self.args.eval_precision == "recipe",
        )

    def check(self, layers: list[Layer]) -> None:
        """Raise UserError where the recipe does not fit the whole model's layers."""
        self.recipe.check_matchers(layers)
        for feature in self.features:
            feature.check(layers)

    def wrap(self, wrapped: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Prepare features for the wrapped chunks; a ``post_wrap_hook``."""
        for feature in self.features:
            feature.wrap(wrapped)
        return wrapped

    @property
    def iterations(self) -> int:
        """Iterations of the whole run."""
        args = self.args
        return args.train_iters or (args.train_samples or 0) // args.global_batch_size or 1

    def progress(self, iteration: int) -> Progress:
        """Return the progress of the run, which decides about switches."""
        args = self.args
        samples = getattr(args, "consumed_train_samples", 0)
        # Megatron-LM sets it when it loads the checkpoint; only switches need it before.
        begins = self.source is not None and iteration == self.start
        if not samples and begins and self.recipe.switches:
            samples = self.source.samples()
        samples = samples or iteration * args.global_batch_size
        return Progress(iteration, samples * args.seq_length, iteration / self.iterations)

    def _begin_step(self, iteration: int, training: bool) -> None:
        for feature in self.features:
            feature.begin_step(iteration, training)
            if training and type(feature).after_backward is not Feature.after_backward:
                run_after_backward(self.chunks, feature.after_backward)

    def show(
        self,
        layers: Sequence[Layer],
        weights: Iterable[Weight] = (),
        capability: tuple[int, int] | None = None,
    ) -> None:
        """Print which layers of the whole model have which precision, and how it is computed.

        ``weights``: shapes and precisions of all ranks' weights, of which those that Transformer
        Engine refuses are named. ``capability``: compute capability of the GPU that is described;
        None for this machine's.
        """
        console = plain_console(130)
        for line in _describe(self.recipe, self.engine, layers, self.args, capability, weights):
            console.print(line)
        for feature in self.features:
            for line in feature.describe():
                console.print(line)


def weight_shapes(chunks: Iterable[torch.nn.Module]) -> list[Weight]:
    """Return shapes and precisions of the weights in blocks, each pair once."""
    pairs = (
        (tuple(weight.shape), state.plan.precision)
        for chunk in chunks
        for weight, state in weights_of(chunk)
    )
    return list(dict.fromkeys(pairs))


def in_order(layers: Iterable[Layer]) -> list[Layer]:
    """Return layers sorted by block and path, each path once."""
    unique = {layer.path: layer for layer in layers}
    return sorted(unique.values(), key=lambda layer: (layer.block, layer.path))


def _describe(
    recipe: Recipe,
    engine: Engine,
    layers: Sequence[Layer],
    args: Namespace,
    capability: tuple[int, int] | None,
    weights: Iterable[Weight] = (),
) -> Iterator[str | Table]:
    yield recipe.summary(layers)
    yield precision_table(recipe, layers)
    for switch in recipe.switches:
        yield f"switch {switch}"
    if recipe.switches or any(recipe.precision_for(layer).quantized for layer in layers):
        yield f"quantization engine: {engine.name} ({engine.reason})"
        yield from _products(recipe, engine, layers)
        how = {"bf16": "nothing is quantized", "recipe": "in the recipe's precision"}
        yield f"validation and test: {how[args.eval_precision]}"
    yield f"transformer layers: {args.transformer_impl}"
    if args.transformer_impl == "transformer_engine":
        from megatron_lowbit.transformer_engine.native import kernels, misfits

        capability = capability or torch.cuda.get_device_capability()
        lines = {}
        for layer in layers:
            name, precision = recipe.config_for(layer), recipe.precision_for(layer)
            whose = kernels(precision, capability)
            if layer.is_output:
                name, whose = layer.path, "this project's" if precision.quantized else "torch's"
            lines[f"  {name or 'high precision'}: {whose} kernels"] = None
        yield from lines
        why = "Transformer Engine's take multiples of 16, in MXFP8 of 32"
        for rows, columns in sorted(misfits(weights, capability)):
            yield f"  weights of {rows} x {columns}: this project's kernels; {why}"


def _products(recipe: Recipe, engine: Engine, layers: Iterable[Layer]) -> Iterable[str]:
    """Describe how the engine multiplies each pair of formats of the recipe."""
    lines = {}
    for layer in layers:
        for name, gemm in recipe.precision_for(layer).gemms.items():
            if gemm.quantized or gemm.accumulation:
                pair = " x ".join(str(side.format) if side else "bf16" for side in gemm.sides)
                where = f"{name}, {pair}" if gemm.accumulation else pair
                lines[f"  {where}: {_product(gemm, engine)}"] = None
    return lines


def _product(gemm: GemmPrecision, engine: Engine) -> str:
    """Describe how the engine multiplies the operands of a GEMM, and sums the products."""
    if gemm.accumulation:  # emulated on every device
        inner, every = gemm.accumulation.inner.upper(), gemm.accumulation.promote_every
        promoted = f" of {every} products, added in FP32" if every else ""
        return f"dequantized to FP32, {inner} sums{promoted}"
    if gemm.dequantizes:  # no tensor cores take the operands
        return "dequantized to FP32, FP32 sums"
    return engine.describe(*(side and side.format for side in gemm.sides), gemm.folding)
