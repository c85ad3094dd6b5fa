"""The schedule of a resumed run: this run's, the checkpoint's, or a refusal."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

import megatron_lowbit.megatron  # noqa: F401  before megatron

# isort: split
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.run import resumed_schedule

RATES = {"max_lr": 6e-4, "min_lr": 6e-5}
OTHER = {"max_lr": 1e-4, "min_lr": 1e-5}
OVERRIDE = {"override_opt_param_scheduler": True}
CHECKPOINTS = {"use_checkpoint_opt_param_scheduler": True}


def group(**changes) -> dict:
    return {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False,
            "default_config": True, **RATES, **changes}  # fmt: skip


@pytest.fixture
def load(monkeypatch):
    """Function that reconciles groups of an optimizer and a checkpoint, under some arguments."""

    def run(own: list[dict], saved: list[dict], **arguments: bool) -> None:
        args = {"override_opt_param_scheduler": False, "use_checkpoint_opt_param_scheduler": False}
        monkeypatch.setattr(resumed_schedule, "get_args", lambda: Namespace(**args | arguments))
        optimizer = SimpleNamespace(optimizer=SimpleNamespace(param_groups=own))
        loaded = []
        wrapped = resumed_schedule._reconciling(lambda self, state: loaded.append(state))
        state = {"optimizer": {"param_groups": saved}}
        wrapped(optimizer, state)
        assert loaded == [state]

    return run


def test_equal_rates_need_no_argument(load):
    own, saved = [group(), group(wd_mult=0.0)], [group(wd_mult=0.0), group()]
    load(own, saved)
    assert own == [group(), group(wd_mult=0.0)] and saved == [group(wd_mult=0.0), group()]


@pytest.mark.parametrize(
    ("arguments", "expected"), [(OVERRIDE, RATES), (CHECKPOINTS, OTHER)], ids=["own", "saved"]
)
def test_the_arguments_choose_the_rates(load, arguments, expected):
    """Both groups have them, so that Megatron-LM finds one by the other and keeps them."""
    decoupled = {"default_config": False}
    own = [group(), group(**decoupled, max_lr=3e-3), group(wd_mult=0.0)]
    saved = [group(wd_mult=0.0, **OTHER), group(**OTHER), group(**decoupled, **OTHER)]
    load(own, saved, **arguments)
    rates = [{name: each[name] for name in RATES} for each in (*own, *saved)]
    other = {"max_lr": 3e-3, "min_lr": 6e-5} if arguments is OVERRIDE else OTHER
    assert rates == [expected, other, expected, expected, expected, other]


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("decoupled", [False, True])
def test_other_rates_are_refused_and_the_arguments_named(load, name, decoupled):
    message = r"--override-opt_param-scheduler takes .* --use-checkpoint-opt_param-scheduler the"
    flags = "--decoupled-lr or --decoupled-min-lr" if decoupled else "--lr or --min-lr"
    own, saved = group(default_config=not decoupled), group(**{name: OTHER[name]})
    with pytest.raises(UserError, match=f"^{flags}: .*{message}"):
        load([own], [saved])


@pytest.mark.parametrize("arguments", [{}, OVERRIDE, CHECKPOINTS])
def test_other_groups_are_refused(load, arguments):
    with pytest.raises(UserError, match=r"groups, as with or without --decoupled-lr; .* --no-load"):
        load([group(), group(default_config=False, max_lr=1e-3)], [group()], **arguments)


def test_groups_of_older_versions_have_no_rates(load):
    saved = group()
    del saved["max_lr"], saved["min_lr"]
    load([group()], [saved])
    assert saved == group()


def test_settings_that_the_checkpoint_restores_are_named(load, capsys):
    load([group(betas=(0.9, 0.99), eps=1e-8)], [group(betas=(0.9, 0.95), eps=1e-8)], **OVERRIDE)
    line = "--adam-beta1 and --adam-beta2: (0.9, 0.95) as in the checkpoint instead of (0.9, 0.99)"
    assert line in capsys.readouterr().out


def test_groups_of_megatron_fsdp_are_found_by_their_parameters(monkeypatch):
    args = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": False}
    monkeypatch.setattr(resumed_schedule, "get_args", lambda: Namespace(**args))
    own, state = group(params=["a", "b"]), {"a": group(**OTHER), "b": group(**OTHER)}
    optimizer = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[own]), _param_name=lambda parameter: parameter
    )
    resumed_schedule._reconciling(lambda *_: None)(optimizer, {"param_to_group_meta": state})
    assert state == {"a": group(), "b": group()}


def scheduler(**changes) -> OptimizerParamScheduler:
    resumed_schedule.follow_schedule_arguments()
    settings = {"init_lr": 0.0, "max_lr": 6e-4, "min_lr": 6e-5, "lr_warmup_steps": 0,
                "lr_decay_steps": 100, "lr_decay_style": "linear", "start_wd": 0.1, "end_wd": 0.1,
                "wd_incr_steps": 100, "wd_incr_style": "constant",
                "use_checkpoint_opt_param_scheduler": False}  # fmt: skip
    return OptimizerParamScheduler(SimpleNamespace(param_groups=[{}]), **settings | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"wd_incr_steps": 200},
            "--train-iters or --train-samples, or --global-batch-size: the total "
            "number of weight decay samples is 200 in this run, but 100",
        ),
        ({"lr_decay_steps": 200}, "--lr-decay-iters .* by default --train-iters .* 200 in"),
        (
            {"lr_warmup_steps": 20},
            "--lr-warmup-iters, .*: the number of warmup samples is 20 in this",
        ),
        ({"lr_decay_style": "cosine"}, "--lr-decay-style: .* is cosine in this run, but linear in"),
        ({"max_lr": 1e-3}, "--lr: the learning rate is 0.001 in this run, but 0.0006 in"),
        ({"min_lr": 0.0}, "--min-lr: the minimum learning rate is 0.0 in this run"),
        ({"end_wd": 0.2, "wd_incr_style": "linear"}, "--weight-decay or --end-weight-decay: "),
    ],
)
def test_another_schedule_is_refused_and_the_arguments_named(changes, message):
    state, choice = scheduler().state_dict(), "; --override-opt_param-scheduler takes"
    with pytest.raises(UserError, match=f"^{message}.*{choice}.* --use-checkpoint-opt_param-sch"):
        scheduler(**changes).load_state_dict(state)
    for choice in (OVERRIDE, CHECKPOINTS):
        resumed = scheduler(**changes, **choice)
        resumed.load_state_dict(state)
        expected = scheduler(**changes) if choice is OVERRIDE else scheduler()
        assert resumed.state_dict() == expected.state_dict()


def test_the_first_step_has_the_weight_decay_of_the_checkpoint():
    """Megatron-LM computes it before it loads the decay's schedule."""
    saved = scheduler(start_wd=0.0, end_wd=0.4, wd_incr_style="linear")
    saved.step(50)
    resumed = scheduler(start_wd=0.0, end_wd=0.8, wd_incr_style="linear", **CHECKPOINTS)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.2)
