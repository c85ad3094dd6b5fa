"""pretrain_gpt.py as a user runs it: it learns, and resumes to the bit."""

from tiny_run import done, losses, metrics


def test_nvfp4_learns_and_leaves_checkpoint_metrics_and_picture(pretrain_here, tmp_path):
    save = tmp_path / "run"
    result = pretrain_here(
        "--fp4-recipe", "nvfp4", "--train-iters", 12, "--save", save, "--eval-interval", 6,
        "--tensorboard-dir", save / "board",
    )  # fmt: skip
    done(result)
    assert "8 of 16 linear layers quantized" in result.stdout
    assert "validation loss" in result.stdout.splitlines()[-2]
    assert (save / "iter_0000012" / "lowbit.json").is_file()
    assert (save / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((save / "board").iterdir())
    curve = losses(save)
    assert list(curve) == list(range(1, 13))
    assert curve[12] < curve[1] - 0.5
    assert [m["iteration"] for m in metrics(save) if "validation_loss" in m] == [6, 12]
    expected = {"iteration", "lm_loss", "grad_norm", "learning_rate", "tokens_per_second",
                "consumed_tokens"}  # fmt: skip
    assert expected <= set(metrics(save)[0])


def test_resume_equals_the_uninterrupted_run_to_the_bit(pretrain_here, pretrain_command, tmp_path):
    """Data order and stochastic rounding included; dropout on, so that random states count too."""
    recipe = ("--fp4-recipe", "nvfp4", "--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    whole, part = tmp_path / "whole", tmp_path / "part"
    done(pretrain_here(*recipe, "--train-iters", 8, "--save", whole, "--save-interval", 4))
    done(pretrain_here(*recipe, "--train-iters", 4, "--save", part))
    assert losses(part) == {k: v for k, v in losses(whole).items() if k <= 4}
    done(pretrain_command(*recipe, "--train-iters", 8, "--save", part, "--load", part))
    assert losses(part) == losses(whole)
    norms = [[m.get("grad_norm") for m in metrics(folder)] for folder in (whole, part)]
    assert norms[0][-1:] == norms[1][-1:]


def test_recomputation_replays_the_same_rounding(pretrain_here, tmp_path):
    for name, extra in (
        ("plain", ()),
        ("full", ("--recompute-granularity", "full", "--recompute-method", "uniform",
                  "--recompute-num-layers", "1")),
    ):  # fmt: skip
        save = tmp_path / name
        done(pretrain_here("--fp4-recipe", "nvfp4", "--train-iters", 3, "--save", save, *extra))
    assert losses(tmp_path / "plain") == losses(tmp_path / "full")


def test_without_evaluation(pretrain_here, tmp_path):
    result = pretrain_here("--train-iters", 2, "--eval-iters", 0, "--save", tmp_path)
    done(result)
    assert "validation" not in result.stdout
    assert len(losses(tmp_path)) == 2
    assert not any("validation_loss" in m for m in metrics(tmp_path))
