"""Token embeddings that add to their main gradients: Megatron-LM's results, bit for bit in FP32."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.megatron import pretrain
from megatron_lowbit.megatron.features.embedding import EmbeddingGradients
from megatron_lowbit.megatron.pretrain import teardown
from tests.marks import others_slow
from tests.megatron.tiny_models import TINY
from tests.short_runs import steps

# isort: split
from megatron.core import parallel_state
from megatron.core.tensor_parallel import VocabParallelEmbedding, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

ARGUMENTS = f"""
    {TINY} --num-layers 1 --swiglu --position-embedding-type rope --global-batch-size 6
    --train-iters 3 --precision-recipe nvfp4
""".split()
UNTIED = "--untie-embeddings-and-output-weights"
CASES = [
    "", UNTIED, "--mtp-num-layers 1", f"{UNTIED} --mtp-num-layers 1", "--deterministic-mode",
    "--use-distributed-optimizer --overlap-grad-reduce",
    "--position-embedding-type learned_absolute",
]  # fmt: skip
ROWS, COLUMNS = 16, 8


class Engine(ReferenceEngine):
    """The reference, which counts the gradients that it adds."""

    added = 0

    def add_rows(self, sums, ids, rows):
        self.added += 1
        super().add_rows(sums, ids, rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="sums on a GPU are in another order")
@pytest.mark.parametrize("more", others_slow(CASES, CASES[:1]))
def test_training_has_the_bits_of_megatron_lms_embedding(more, tmp_path, monkeypatch):
    """Three steps of three micro batches: losses and gradient norms.

    With multi-token prediction a micro batch has two gradients. Megatron-LM adds them to each other
    before it adds them to the main gradient, so sums are rounded elsewhere.
    """
    engine = Engine("test")

    def install(feature):
        feature.run.engine = engine
        original(feature)

    original = EmbeddingGradients.install
    monkeypatch.setattr(EmbeddingGradients, "install", install)
    arguments = [*ARGUMENTS, *more.split(), "--save"]
    pretrain.main([*arguments, str(tmp_path / "with")])
    assert engine.added == 9 * (1 + ("mtp" in more))
    monkeypatch.setattr(EmbeddingGradients, "is_on", lambda args, recipe: False)
    pretrain.main([*arguments, str(tmp_path / "without")])
    seen, expected = (np.array([*steps(tmp_path / run).values()]) for run in ("with", "without"))
    assert seen.shape == (3, 2)
    np.testing.assert_allclose(seen, expected, rtol=3e-7 if "mtp" in more else 0)


@pytest.mark.parametrize(
    ("change", "is_on"),
    [
        ({}, True),
        ({"gradient_accumulation_fusion": False}, False),
        ({"use_megatron_fsdp": True}, False),
        ({"use_torch_fsdp2": True}, False),
    ],
)
def test_only_main_gradients_of_whole_weights_are_added_to(change, is_on):
    usual = {
        "gradient_accumulation_fusion": True, "use_megatron_fsdp": False, "use_torch_fsdp2": False,
    }  # fmt: skip
    assert EmbeddingGradients.is_on(SimpleNamespace(**usual | change), None) == is_on


@pytest.fixture
def embeddings(request):
    """Megatron-LM's embedding of a rank, and one with the feature; groups send nothing."""
    rank, ranks, reduce_scatter = request.param
    with teardown():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        parallel_state.initialize_model_parallel(ranks, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        config = TransformerConfig(
            num_layers=1, hidden_size=COLUMNS, num_attention_heads=2, use_cpu_initialization=True,
            tensor_model_parallel_size=ranks, params_dtype=torch.bfloat16,
        )  # fmt: skip
        pair = []
        for _ in range(2):
            module = VocabParallelEmbedding(
                ROWS, COLUMNS, init_method=torch.nn.init.normal_, config=config,
                reduce_scatter_embeddings=reduce_scatter,
            )  # fmt: skip
            module.weight.main_grad = torch.ones(module.weight.shape)
            module.weight.grad_added_to_main_grad = False
            module.weight.zero_out_wgrad = True  # as of a weight that the output layer shares
            pair.append(module)
        pair[1].load_state_dict(pair[0].state_dict())
        EmbeddingGradients(SimpleNamespace(chunks=[pair[1]], engine=ReferenceEngine("t"))).install()
        yield pair


@pytest.mark.parametrize(
    "embeddings", [(0, 1, False), (0, 1, True), (0, 2, False), (1, 2, False)], indirect=True
)
def test_a_rank_has_the_rows_and_the_sums_of_its_own_tokens(embeddings):
    """In BF16, of which FP32 sums are compared with FP64."""
    upstream, own = embeddings
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(0, ROWS, (3, 40), generator=draws)
    expected, seen = upstream(ids), own(ids)
    assert torch.equal(seen, expected)
    grad = torch.randn(expected.shape, generator=draws).bfloat16()
    seen.backward(grad)
    by_token = (grad.transpose(0, 1) if own.reduce_scatter_embeddings else grad).double()
    start, end = own.vocab_start_index, own.vocab_end_index
    here = (ids >= start) & (ids < end)
    exact = torch.ones(end - start, COLUMNS, dtype=torch.float64)
    exact.index_add_(0, ids[here] - start, by_token[here])
    assert (own.weight.main_grad - exact).abs().max() <= 1e-5
    assert own.weight.grad_added_to_main_grad and own.weight.grad.shape == own.weight.shape
    assert not own.weight.zero_out_wgrad  # else all rows of zeros would be added


@pytest.mark.parametrize("embeddings", [(0, 1, False)], indirect=True)
def test_what_needs_no_gradient_adds_none(embeddings):
    """Evaluation, and a frozen weight."""
    upstream, own = embeddings
    ids = torch.tensor([[1, 2]])
    with torch.no_grad():
        assert torch.equal(own(ids), upstream(ids))
    own.weight.requires_grad_(False)
    rows = own(ids)
    assert torch.equal(rows, upstream(ids)) and not rows.requires_grad
