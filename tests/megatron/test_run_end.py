"""The end of a run: one validation of the last iteration, and lines about what is saved."""

from argparse import Namespace

import pytest

from megatron_lowbit.megatron import pretrain
from megatron_lowbit.storage import files

# isort: split
from megatron.training import training


@pytest.mark.parametrize(("last", "skipped"), [(250, True), (240, False)])
def test_the_last_iteration_is_validated_once(monkeypatch, last, skipped):
    """Test data is another matter, and so is an iteration that the loop has not validated."""
    calls = []
    monkeypatch.setattr(training, "evaluate_and_print_results", lambda *all, **_: calls.append(all))
    upstream = training.evaluate_and_print_results
    loop, end, test = (
        "iteration 250",
        f"iteration {last} on validation set",
        "iteration 250 on test",
    )
    with pretrain.validate_once():
        for prefix in (loop, end, test):
            training.evaluate_and_print_results(prefix, "forward", verbose=True)
    assert calls == [(loop, "forward"), *[(end, "forward")] * (not skipped), (test, "forward")]
    assert training.evaluate_and_print_results is upstream


def interrupted(folder, load=None, rank=0) -> str:
    save = folder and str(folder)
    args = Namespace(rank=rank, save=save, load=load, save_interval=500, curr_iteration=7)
    with pytest.raises(KeyboardInterrupt) as caught, pretrain.explain_interruption(args):
        raise KeyboardInterrupt
    return str(caught.value)


def test_ctrl_c_says_what_is_lost(tmp_path):
    lost = "interrupted after iteration 7: nothing was saved; the same command starts again"
    assert interrupted(None) == lost
    earlier = f"{lost}, and a --save-interval below 500 saves earlier"
    assert interrupted(tmp_path) == earlier
    assert interrupted(tmp_path, rank=1) == ""
    files.write_tracker(tmp_path, 10)  # of another run
    assert interrupted(tmp_path) == earlier
    files.write_tracker(tmp_path, 5)
    saved = "interrupted after iteration 7: saved up to iteration 5; the same command"
    assert interrupted(tmp_path) == f"{saved} with --load {tmp_path} goes on from there"
    assert interrupted(tmp_path, load=str(tmp_path)) == f"{saved} goes on from there"


def test_the_last_line_names_no_checkpoint_that_does_not_exist(tmp_path):
    args = Namespace(save=str(tmp_path))
    assert pretrain.saved_in(args) == f"no checkpoint in {tmp_path}"
    files.write_tracker(tmp_path, 3)
    assert pretrain.saved_in(args) == f"checkpoint {tmp_path}"
