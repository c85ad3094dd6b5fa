"""Linear layers under a recipe, in anyone's modules: identity, precision, and state."""

import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowbit.kernels.engine import Engine
from megatron_lowbit.layers import UNSHARDED, LinearContext, Shards, WeightCache
from megatron_lowbit.layers.grouped import GroupContext, can_group
from megatron_lowbit.megatron.run.steps import microbatch_key
from megatron_lowbit.numerics import AmaxHistory, Operand, QuantizedTensor, derive_key
from megatron_lowbit.numerics.gemms import GEMM_ROLES
from megatron_lowbit.numerics.mxnorm import MXNorm
from megatron_lowbit.numerics.randomness import GROUP, Key, layer_key
from megatron_lowbit.recipes import OPERANDS, Layer, LinearPrecision

_BLOCK = re.compile(r"(?P<where>.*?\blayers)\.\d+")
_GROUPED = re.compile(r"(?<=\.experts\.)(linear_fc\d)\.(\d+)$")
_EXPERT = re.compile(r"(?<=local_experts\.)\d+")


@dataclass(frozen=True)
class LayerPlan:
    """Identity, precision and engine of one linear layer.

    Attributes:
        norm: normalization of the input, where MXNorm is part of the layer.
        evaluates: True if evaluations use the precision, too, not high precision.
    """

    layer: Layer
    precision: LinearPrecision
    engine: Engine
    accumulate_main_grad: bool
    norm: MXNorm | None = None
    evaluates: bool = True


def layer_of(chunk: torch.nn.Module, name: str, first_expert: int) -> Layer | None:
    """Return the layer that a recipe's rules see for a module; None for one outside the blocks.

    Megatron-LM names modules by the chunk's block numbers and the rank's expert numbers; rules see
    global numbers, and grouped experts as if they were not grouped. Blocks of multi-token
    prediction come after the decoder's last. ``name`` is the module's path in the chunk,
    ``first_expert`` the global number of the rank's first expert.
    """
    match = _BLOCK.match(name)
    if match is None:
        return None
    num_blocks = chunk.config.num_layers
    number = chunk.get_submodule(match[0]).layer_number - 1
    path = f"{match['where']}.{number}{name[match.end() :]}"
    path = _GROUPED.sub(r"local_experts.\2.\1", path)
    path = _EXPERT.sub(lambda expert: str(int(expert[0]) + first_expert), path)
    return Layer(path, number + (num_blocks if name.startswith("mtp.") else 0), num_blocks)


def first_local_expert(config: TransformerConfig) -> int:
    """Return the global number of this rank's first expert."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    rank = parallel_state.get_expert_model_parallel_rank()
    return rank * ((config.num_moe_experts or 0) // ranks)


def replica_groups(is_expert: bool) -> list[dist.ProcessGroup]:
    """Return groups that together span the ranks with parts or replicas of a layer."""
    if not is_expert:
        return [parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)]
    return [
        parallel_state.get_expert_tensor_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
    ]


def replica_id(is_expert: bool) -> tuple[int, int]:
    """Return this rank's place among those ranks; zeros on exactly one of them."""
    if not is_expert:
        return (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
    return (
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_data_parallel_rank(),
    )


class LayerState:
    """Plan, random key, amax histories, cached quantized weight and fallbacks of a layer.

    Modules hold it as ``layer_state``, or one for each of their experts as ``expert_states``, of
    which the first keeps the quantized weights of all in ``group_cache``.

    Args:
        plan: the layer's identity, precision and engine.
        device: where the layer computes.
        group: tensor-parallel ranks of a column- or row-parallel layer (``is_column``).
        features: global numbers (int64) of the features that the ranks split; None for no split.

    Attributes:
        path_key: key of the layer's path, of which random keys derive.
        graph_keys: what graphs read in device memory, where calls are captured.
        main_grad_beta: as of a ``LinearContext``.
        saves_input: as of a ``LinearContext``.
    """

    saves_input = False

    def __init__(
        self,
        plan: LayerPlan,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        features: torch.Tensor | None = None,
        is_column: bool = True,
        is_expert: bool = False,
    ) -> None:
        self.plan, self.device, self.is_expert = plan, device, is_expert
        self.group, self.features, self.is_column = group, features, is_column
        self.weight_cache, self.group_cache = WeightCache(), WeightCache()
        self.amax_history: AmaxHistory | None = None
        self.fallbacks: torch.Tensor | None = None
        self.graph_keys: torch.Tensor | None = None
        self.main_grad_beta: bool | None = None
        self._input_codes: tuple[weakref.ref, QuantizedTensor] | None = None
        self.path_key = derive_key(plan.layer.path)
        self.set_precision(plan.precision)

    def set_precision(self, precision: LinearPrecision) -> None:
        """Compute in another precision from now on; recorded amaxes stay where they are used."""
        self.plan = replace(self.plan, precision=precision)
        self.forget_weight()
        if precision.falls_back and self.fallbacks is None:
            self.fallbacks = torch.zeros(len(GEMM_ROLES), dtype=torch.int64, device=self.device)
        length = precision.history_length
        if length == 0:
            self.amax_history = None
        elif self.amax_history is None or self.amax_history.length != length:
            self.amax_history = AmaxHistory(len(OPERANDS), length, self.device)

    def set_input_codes(self, x: torch.Tensor, codes: QuantizedTensor) -> None:
        """Keep the codes of x (..., K) for fprop, if x itself is the next input."""
        self._input_codes = weakref.ref(x), codes

    def operand_of(self, x: torch.Tensor) -> torch.Tensor | Operand:
        """Return x (..., K), with its codes if they were set."""
        given, self._input_codes = self._input_codes, None
        if given is None or given[0]() is not x:
            return x
        return Operand(given[1], None, x)

    def context(self, shards: Shards, cache: WeightCache | None = None) -> LinearContext:
        """Return the context of a call in the present microbatch; ``cache`` replaces its own."""
        cache = cache or self.weight_cache
        if self.graph_keys is not None and not cache.stored:
            cache = None  # A graph quantizes the weight itself.
        return LinearContext(
            self.plan.precision,
            self.plan.engine,
            self.call_key(),
            shards=shards,
            accumulate_main_grad=self.plan.accumulate_main_grad,
            main_grad_beta=self.main_grad_beta,
            amax_history=self.call_history(),
            weight_cache=cache,
            fallbacks=None if _is_warming_up() else self.fallbacks,
            saves_input=self.saves_input,
        )

    @property
    def quantizes_weight(self) -> bool:
        """True if this project quantizes the weight, once for all microbatches of a step."""
        return self.plan.precision.quantized and self.plan.precision.caches_weight

    def is_active(self, training: bool) -> bool:
        """Return True if a call in training, or in evaluation, is quantized."""
        return self.plan.precision.quantized and (training or self.plan.evaluates)

    def call_key(self) -> Key:
        """Return the key of a call; a copy of the keys in device memory, for its backward pass."""
        if not self.plan.precision.stochastic:
            return 0
        return self.microbatch_key() if self.graph_keys is None else self.graph_keys.clone()

    def call_history(self) -> AmaxHistory | None:
        """Return the amax history; one without a record for passes whose results are not used."""
        if self.amax_history is None or not _is_warming_up():
            return self.amax_history
        return self.amax_history.without_record()

    def weight_context(self) -> LinearContext:
        """Return a context for quantizing only the weight, which draws no random numbers."""
        return LinearContext(
            self.plan.precision,
            self.plan.engine,
            key=0,
            shards=self.shards(),
            weight_cache=self.weight_cache,
        )

    def shards(self, sequence_parallel: bool = False, allreduce_dgrad: bool = False) -> Shards:
        """Return the parts of this column- or row-parallel layer that tensor parallelism splits."""
        if self.features is None:
            return UNSHARDED
        if not self.is_column:
            return Shards(self.group, frozenset({"weight", "input"}), in_features=self.features)
        return Shards(
            self.group,
            frozenset({"weight", "grad", "input"} if sequence_parallel else {"weight", "grad"}),
            out_features=self.features,
            sequence_parallel=sequence_parallel,
            allreduce_dgrad=allreduce_dgrad,
        )

    def forget_weight(self) -> None:
        """Discard the quantized weight, unless it is stored: the weight has changed."""
        self.weight_cache.forget()
        self.group_cache.forget()

    def microbatch_key(self) -> int:
        """Return the key of this layer's random numbers in the present microbatch."""
        return layer_key(microbatch_key(self.is_expert), self.path_key)


def expert_contexts(
    states: Sequence[LayerState], training: bool, in_bf16: bool, has_bias: bool = False
) -> GroupContext | list[LinearContext | None] | None:
    """Return the context of a call of a rank's experts, or a list with one of each expert.

    An entry is None for an expert in high precision, the whole result where all of them are, unless
    tokens and weights are ``in_bf16`` and the engine multiplies all experts together.
    """
    first = states[0]
    if not any(state.is_active(training) for state in states):
        together = in_bf16 and not has_bias and first.plan.engine.multiplies_groups
        if not together or any(state.plan.precision.quantized for state in states):
            return None
    precision = first.plan.precision
    if not has_bias and all(state.plan.precision == precision for state in states):
        context = first.context(first.shards(), first.group_cache)
        if can_group(context):
            keys: list[int] = []
            if precision.stochastic:
                microbatch = microbatch_key(first.is_expert)
                keys = [layer_key(microbatch, state.path_key) for state in states]
            return GroupContext(context, keys)
    return [
        state.context(state.shards()) if state.plan.precision.quantized else None
        for state in states
    ]


def _is_warming_up() -> bool:
    """Return True in passes before a capture, which are computed on any numbers."""
    return is_graph_capturing() and not torch.cuda.is_current_stream_capturing()


def device_of(weight: torch.Tensor | None) -> torch.device:
    """Return the device on which a linear layer computes, which its weight may not be on yet.

    Models that are initialized on the CPU move to the GPU after their hooks ran; those on the meta
    device stay there.
    """
    if weight is not None and weight.device.type == "meta":
        return weight.device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def split_features(
    split: int, weight: torch.Tensor | None, group: dist.ProcessGroup, parts: int | None = None
) -> torch.Tensor | None:
    """Return the global numbers (int64) of a rank's ``split`` features; None if unsplit.

    They may come in ``parts``, each split over the tensor-parallel group: a gated fc1 holds its
    share of the gate, then its share of the up projection. None takes as many as Megatron-LM notes
    on the weight. A part's numbers start at a multiple of 16, as random bits are drawn: parts of
    another size leave gaps, and draw other bits than the whole layer does.
    """
    ranks = group.size()
    if ranks == 1:
        return None
    parts = parts or getattr(weight, "partition_stride", 1)
    part = split // parts
    starts = (torch.arange(parts) * ranks + group.rank()) * (part + -part % GROUP)
    return (starts[:, None] + torch.arange(part)).flatten().to(device_of(weight))


def weights_of(chunk: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, LayerState]]:
    """Yield the weights in a chunk's blocks that a recipe reaches, with their layers' states.

    The output layer's may be the embedding's, too, which needs it in BF16.
    """
    for module in chunk.modules():
        state = getattr(module, "layer_state", None)
        if state is not None and not state.plan.layer.is_output:
            yield module.weight, state
        for number, state in enumerate(getattr(module, "expert_states", ())):
            yield getattr(module, f"weight{number}"), state


def layer_states(chunks: Iterable[torch.nn.Module]) -> Iterator[LayerState]:
    """Yield the states of this rank's linear layers that a recipe reaches."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "layer_state"):
            yield module.layer_state
        yield from getattr(module, "expert_states", ())
