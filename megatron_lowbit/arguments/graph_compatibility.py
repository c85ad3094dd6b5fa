"""CUDA graphs that a model or a recipe excludes, as rows of ``compatibility.py``."""

from argparse import Namespace

from megatron_lowbit.arguments.rows import Rows
from megatron_lowbit.kernels.support import has_kernel
from megatron_lowbit.recipes import LinearPrecision, Recipe


def graphs_of_experts(args: Namespace) -> Rows:
    """Return CUDA graphs that cannot be captured: a dispatcher waits for the CPU inside of them."""
    implementation, pattern = args.cuda_graph_impl, args.hybrid_layer_pattern
    # Padded to its capacity, each expert has the same number of tokens in every micro batch.
    if (
        not args.num_experts
        or implementation not in ("local", "transformer_engine")
        or args.moe_token_dispatcher_type not in ("allgather", "alltoall")
        or args.moe_pad_expert_input_to_capacity
    ):
        return {}
    modules = _modules(args)
    is_whole = modules <= {"full"}  # a deprecated name for no modules
    is_local = implementation == "local"  # captures moe_preprocess together with moe_router
    prepares = "moe_preprocess" in modules or (is_local and "moe_router" in modules)
    in_gpt = is_local and pattern is None
    flag = f"--cuda-graph-impl {implementation} with --num-experts {args.num_experts}"
    parts = ["attn", *(["mamba"] if pattern else []), "moe_router", "moe_preprocess"]
    named = f"--cuda-graph-modules {' '.join(parts)} --moe-token-dispatcher-type alltoall"
    return {
        f"{flag}: a capture cannot wait for token counts, and local graphs of a GPT have no parts "
        f"without experts; give --cuda-graph-impl transformer_engine {named}": in_gpt,
        f"{flag}: a capture of whole layers cannot wait for token counts; give {named}": is_whole,
        "--moe-router-padding-for-quantization with --cuda-graph-modules moe_preprocess: a capture "
        "cannot wait for numbers of padded tokens; omit the padding": (
            args.moe_router_padding_for_quantization and prepares
        ),
    }


def cuda_graphs(args: Namespace, recipe: Recipe) -> Rows:
    """Return uses of a recipe that the graphs of ``--cuda-graph-impl`` exclude."""
    implementation = args.cuda_graph_impl
    if implementation == "none" or not any(p.quantized for p in recipe.precisions()):
        return {}
    is_local = implementation == "local"
    evaluates = (args.eval_iters or args.full_validation) and args.eval_precision != "recipe"
    captures_experts = is_local and not _modules(args).isdisjoint(("moe_router", "moe_preprocess"))
    in_gpt = args.num_experts and args.hybrid_layer_pattern is None
    way_out = "use no switch" if in_gpt else "use local"
    recomputes = args.recompute_granularity is not None and args.pipeline_model_parallel_size > 1
    reasons = {
        "random keys are filled in before each microbatch, which it replays as one; use local": (
            implementation == "full_iteration"
        ),
        f"it cannot capture again where the recipe switches; {way_out}": (
            not is_local and recipe.switches
        ),
        "it replays training's graphs in evaluation; use --eval-precision recipe": (
            captures_experts and evaluates
        ),
        "fresh signs of a format without kernels are drawn on the CPU; use signs: fixed": any(
            map(_reads_signs, recipe.precisions())
        ),
        "--fused-allreduce-norm counts its calls on the CPU": args.fused_allreduce_norm,
        "not with --overlap-moe-expert-parallel-comm; omit one of them": (
            args.overlap_moe_expert_parallel_comm
        ),
        "recomputation in a pipeline would find another microbatch's random keys": recomputes,
    }
    return {
        f"--cuda-graph-impl {implementation} under a recipe: {reason}": given
        for reason, given in reasons.items()
    }


def _reads_signs(precision: LinearPrecision) -> bool:
    """Return True if a GPU's fresh signs are read by the CPU: for operands without a kernel."""
    gemms = precision.gemms.values()
    fresh = [gemm for gemm in gemms if gemm.hadamard and gemm.hadamard.signs == "fresh"]
    return any(not has_kernel(side) for gemm in fresh for side in gemm.sides if side)


def _modules(args: Namespace) -> set[str]:
    """Return the names of the parts of layers that are captured."""
    return {getattr(module, "name", module) for module in args.cuda_graph_modules}
