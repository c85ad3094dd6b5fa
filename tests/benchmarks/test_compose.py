"""The benchmark of pairs of features: its cheapest cells, and how it judges what it finds."""

import json
import math
import multiprocessing
import os
import runpy
import subprocess
import time
from pathlib import Path

import pytest
import torch

from benchmarks import compose, compose_features, compose_runs
from benchmarks.compose_features import FEATURES, PAIRS, Run, runs_of

PAIR = Run(("SP", "switch"), "local", "fp8-tile", on_gpu=False)
ALONE = PAIR._replace(features=("recompute-selective", "switch"))
REFUSED = PAIR._replace(features=("CP2", "switch"))
GRAPHS = PAIR._replace(features=("graphs", "switch"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="judges what a CPU refuses")
@pytest.mark.slow
@pytest.mark.parametrize("parity", [[], [PAIR]])
def test_the_cheapest_cells(tmp_path, parity):
    """Cells that are equal, refused, and impossible without a GPU; one at parity has two ranks."""
    context = multiprocessing.get_context("forkserver")
    results = compose.Results(tmp_path / "out.json", {"machine": {}})
    composer = compose.Composer(context, results, tmp_path, 0, 120, math.inf)
    composer.compose([*parity, ALONE, REFUSED, GRAPHS], jobs=1)
    document = json.loads((tmp_path / "out.json").read_text())
    cells = {tuple(cell["features"]): cell for cell in document["cells"]}
    found = {features: cell["outcome"] for features, cell in cells.items()}
    assert found == dict.fromkeys((pair.features for pair in parity), "parity") | {
        ALONE.features: "equal", REFUSED.features: "refused", GRAPHS.features: "needs a GPU",
    }, cells  # fmt: skip
    for pair in parity:  # On some processors the sums of two ranks give the loss of one.
        gaps = cells[pair.features]["loss"], cells[pair.features]["norm"]
        assert max(gaps) > 0
        assert all(gap < bound for gap, bound in zip(gaps, pair.bounds(), strict=True))
    assert cells[REFUSED.features]["message"].startswith("--context-parallel-size 2 with ")
    assert [entry["key"] for entry in document["references"]] == ["local fp8-tile switch"]


def test_nothing_is_left_of_a_crew(tmp_path, monkeypatch):
    """A run that fails leaves a process of its own behind, as an asynchronous save does."""

    def train(arguments, folder, logs, began):
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "pid").write_text(str(child.pid))
        raise RuntimeError

    monkeypatch.setattr(compose_runs, "_train", train)
    crew = compose_runs.Crew(multiprocessing.get_context("fork"), 1, {}, 1)
    assert crew.make([[]], tmp_path / "run", 60).kind == "failed"
    crew.end()
    status = Path("/proc", (tmp_path / "pid").read_text(), "status")
    deadline = time.monotonic() + 10  # a signal takes its time
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_known_cells_and_late_ones_are_not_run(tmp_path):
    file = tmp_path / "out.json"
    file.write_text(json.dumps({"cells": [{"key": PAIR.key, "outcome": "equal"}]}))
    results = compose.Results(file, {"machine": {}})
    composer = compose.Composer(None, results, tmp_path, 0, 120, time.monotonic() - 1)
    composer.compose([PAIR, ALONE], jobs=1)
    assert results.cells == {PAIR.key: {"key": PAIR.key, "outcome": "equal"}}


def test_four_ranks_need_four_gpus(tmp_path):
    results = compose.Results(tmp_path / "out.json", {"machine": {}})
    composer = compose.Composer(None, results, tmp_path, 2, 120, time.monotonic() - 1)
    composer.compose([Run(("TP2", "PP2"), "te", "bf16", True, True)], jobs=1)
    assert [cell["outcome"] for cell in results.cells.values()] == ["needs 4 GPUs"]


def test_ranks_that_share_a_gpu_are_of_several_hosts(tmp_path, monkeypatch):
    """NCCL refuses two ranks of one host on a GPU."""

    def train(arguments, folder, logs, began):
        values = (os.environ[name] for name in ("LOCAL_RANK", "NCCL_HOSTID"))
        (tmp_path / os.environ["RANK"]).write_text(" ".join(values))

    monkeypatch.setattr(compose_runs, "_train", train)
    monkeypatch.setattr(compose_runs, "GRACE", 0.1)  # forked ranks hold each other's pipes open
    crews = compose_runs.Crews(multiprocessing.get_context("fork"), gpus=2)
    with crews.crew(Run(("TP2", "PP2"), "te", "bf16", True, True)) as crew:
        assert crew.make([[]], tmp_path / "run", 60).kind == "ended"
    crews.end()
    places = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert places == ["0 host-0", "1 host-0", "0 host-1", "1 host-1"]


def test_hybrids_of_transformer_engine_need_mamba(tmp_path, monkeypatch):
    monkeypatch.setattr(compose_features, "find_spec", lambda name: None)
    results = compose.Results(tmp_path / "out.json", {"machine": {}})
    composer = compose.Composer(None, results, tmp_path, 2, 120, time.monotonic() - 1)
    runs = [Run(("hybrid", "MTP"), layers, "bf16", True, True) for layers in ("te", "local")]
    composer.compose(runs, jobs=1)
    assert [cell["outcome"] for cell in results.cells.values()] == ["needs mamba-ssm"]


@pytest.mark.parametrize(
    ("package", "error", "kind"),
    [
        ("transformer_engine", "ValueError", "refused"),
        ("megatron", "NotImplementedError", "refused"),
        ("transformer_engine", "RuntimeError", "failed"),
        ("torch", "ValueError", "failed"),
    ],
)
def test_what_a_package_checks_is_refused(package, error, kind, tmp_path):
    file = tmp_path / package / "attention.py"
    file.parent.mkdir()
    file.write_text(f"raise {error}('no backend')\n")
    with pytest.raises((ValueError, RuntimeError)) as raised:
        runpy.run_path(str(file))
    found = compose_runs._describe(raised.value, began=False)
    assert found["kind"] == kind and found["message"].endswith(": no backend")


@pytest.mark.parametrize(
    ("features", "ranks", "reference"),
    [
        (("TP2", "PP2"), 4, ()),
        (("TP2", "EP2"), 2, ("MoE",)),
        (("EP2", "ETP2"), 4, ("MoE",)),
        (("PP2", "EP2"), 4, ("MoE",)),
        (("resume", "delayed"), 1, ("delayed",)),
        (("hybrid", "MLA"), 1, ("hybrid", "MLA")),
        (("SP", "quantized-params"), 4, ("SP", "DP2")),
        (("resume", "quantized-params"), 2, ("DP2",)),
        (("VPP", "EP2-overlap"), 4, ("VPP", "EP2")),
        (("quantized-params", "EP2-overlap"), 2, ("EP2", "DP2")),
    ],
)
def test_ranks_and_references(features, ranks, reference):
    one = Run(features, "local", "bf16", on_gpu=False)
    assert (one.ranks, one.reference().features) == (ranks, reference)


def test_a_seed_is_that_of_all_runs_of_a_pair(tmp_path):
    one = Run(("TP2", "MTP"), "te", "nvfp4", on_gpu=True, seed=3)
    runs = [one, one.reference(), one.start()]
    assert [run.key for run in runs] == [
        "te nvfp4 TP2 MTP seed-3", "te nvfp4 MTP seed-3", "te bf16 MTP seed-3",
    ]  # fmt: skip
    for run in runs:
        words = run.arguments(tmp_path)
        assert words[words.index("--seed") + 1] == "3"


@pytest.mark.parametrize("layers", ["local", "te"])
@pytest.mark.parametrize("features", [("graphs", "MoE"), ("EP2", "graphs"), ("ETP2", "graphs")])
def test_graphs_of_experts_are_of_parts_and_compared_with_their_dispatcher(
    features, layers, tmp_path
):
    one = Run(features, layers, "nvfp4", on_gpu=True, in_bf16=True)
    reference = one.reference()
    assert reference.key == f"{layers} nvfp4 MoE in_bf16 alltoall"
    words, of_reference = (" ".join(run.arguments(tmp_path)) for run in (one, reference))
    graphs = "--cuda-graph-impl transformer_engine"
    assert graphs in words and graphs not in of_reference
    assert "--cuda-graph-modules attn moe_router moe_preprocess" in words
    for line in (words, of_reference):
        assert "--moe-token-dispatcher-type alltoall" in line
        assert ("--moe-permute-fusion" in line) == (layers == "te")
    dense = one._replace(features=("graphs", "MLA")).arguments(tmp_path)
    assert ("local" in dense[dense.index("--cuda-graph-impl") + 1]) == (layers == "te")
    assert "--cuda-graph-modules" not in dense


def test_every_pair_has_a_run_of_its_own():
    runs = list(runs_of("te", "nvfp4", on_gpu=True))
    assert len(runs) == len({one.key for one in runs}) == len(PAIRS) == 24 * 25 // 2
    assert {name for one in runs for name in one.features} == set(FEATURES)


@pytest.mark.parametrize(
    ("loss", "norm", "resumed", "outcome"),
    [
        (2.0, 3.0, 2.0, "equal"),
        (2.0 + 1e-6, 3.0, 2.0 + 1e-6, "parity"),
        (2.0 + 1e-5, 3.0, 2.0 + 1e-5, "apart"),
        (2.0, 3.0 + 1e-2, 2.0, "apart"),
        (2.0, 3.0, 2.0 + 1e-7, "apart"),
        (math.nan, 3.0, math.nan, "apart"),
    ],
)
def test_outcomes(loss, norm, resumed, outcome, tmp_path):
    """Losses of both steps, the first gradient norm, and the step that is resumed."""
    one = Run(("DP2", "resume"), "local", "bf16", on_gpu=False)
    results = compose.Results(tmp_path / "out.json", {})
    steps = {"1": [2.5, 3.0], "2": [2.0, 4.0]}
    results.references[one.reference().key] = {"outcome": "ended", "steps": steps}
    composer = compose.Composer(None, results, tmp_path, 0, 1, 0)
    found = composer._compare(one, [{1: (2.5, norm), 2: (loss, 4.0)}, {2: (resumed, 4.0)}])
    assert found["outcome"] == outcome
