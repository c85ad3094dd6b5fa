"""The bugs in docs/upstream-notes.md are in the installed Megatron-LM.

A new version of it that lacks one, or moves a line that the page names, fails here.
"""

import argparse
import inspect
import re
from importlib.metadata import version
from pathlib import Path

import pytest

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
import megatron.core
import megatron.training
from megatron.core.datasets import utils
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.training import argument_utils, checkpointing, initialize
from megatron.training.arguments import add_megatron_arguments
from megatron.training.training import get_train_valid_test_num_samples

PAGE = (Path(__file__).parents[2] / "docs" / "upstream-notes.md").read_text(encoding="utf-8")
MEGATRON = Path(megatron.core.__file__).parents[1]
CITED = {
    "training.py:2594": "should_reset = not is_first_iteration",
    "training.py:4423": "'{} validation{}'.format(key, suffix)",
    "training.py:4481": "args.train_iters // args.eval_interval",
    "checkpointing.py:1011": "open(tracker_filename, 'w')",
    "checkpointing.py:1697": "sys.exit()",
    "checkpointing.py:2254": "--ckpt-fully-parallel-save",
    "megatron_dataset.py:60": 'unique_identifiers["dataset_path"]',
    "multi_latent_attention.py:739": "= gather_from_tensor_model_parallel_region(kv_combined)",
    "mlp.py:354": "output += output_bias",
    "distrib_optimizer.py:839": "assert len(steps) == 1",
    "distrib_optimizer.py:2061": "def load_parameter_state_from_dp_reshardable",
}


def test_the_page_is_about_the_installed_version():
    assert PAGE.startswith(f"# Notes on Megatron-LM {version('megatron-core')}\n")


def test_every_cited_line_is_known():
    assert set(re.findall(r"(\w+\.py:\d+)", PAGE)) == CITED.keys()


@pytest.mark.parametrize("place", CITED)
def test_cited_lines_hold_what_the_page_says(place):
    name, _, number = place.partition(":")
    (file,) = (path for path in MEGATRON.rglob(name) if path.parent.name != "dist_checkpointing")
    assert CITED[place] in file.read_text(encoding="utf-8").splitlines()[int(number) - 1]


def test_help_fails():
    parser = argparse.ArgumentParser()
    add_megatron_arguments(parser)
    with pytest.raises(ValueError, match=r"unsupported format character '\)'"):
        parser.format_help()


def test_there_is_no_makefile_for_the_dataset_helpers():
    folder = Path(utils.__file__).parent
    assert not (folder / "Makefile").exists() and list(folder.glob("helpers_cpp*.so"))


def test_override_is_imported_from_typing():
    for name in ("gpt", "hybrid"):
        source = (MEGATRON / "training" / "models" / f"{name}.py").read_text(encoding="utf-8")
        assert re.search(r"^from typing import .*\boverride\b", source, re.MULTILINE)


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


def test_an_empty_tracker_file_ends_the_next_start(tmp_path, capsys):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    with pytest.raises(SystemExit) as ended:
        checkpointing.read_metadata(str(tracker))
    assert ended.value.code is None and "Invalid metadata file" in capsys.readouterr().out
