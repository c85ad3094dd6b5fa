"""A process that makes no progress ends itself and says where; a lost rank is told from a bug."""

import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from megatron_lowbit.errors import TrainingError, UserError
from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.watchdog import Watchdog, lost_ranks_named

SCRIPT = """
import os, sys, time
from megatron_lowbit.training import watchdog
from megatron_lowbit.training.run_log import rank_log_file

def stuck():
    print("stuck at", time.time(), flush=True)
    time.sleep(60)

"""


def script(body: str) -> list[str]:
    return [sys.executable, "-c", SCRIPT + body]


def test_it_ends_a_process_without_beats_and_no_other(tmp_path):
    """1.2 seconds: beats for twice as long keep it quiet, and so does leaving it."""
    body = f"""
with watchdog.Watchdog(0.02, 3) as watched:
    for number in range(8):
        watched.beat(f"iteration {{number}}")
        time.sleep(0.3)
time.sleep(1.5)
with rank_log_file({str(tmp_path)!r}, 3), watchdog.Watchdog(0.02, 3) as watched:
    watched.beat("iteration 8")
    stuck()
"""
    result = subprocess.run(script(body), capture_output=True, text=True, timeout=60)
    ended = time.time()
    assert result.returncode == 1, result.stderr
    _, line, *stacks = result.stderr.splitlines()
    assert line.startswith("error: rank 3: no progress for 0.02 minutes in iteration 8, at <string")
    assert line.endswith(" in stuck; --distributed-timeout-minutes")
    assert any(stack.endswith(" in stuck") for stack in stacks)
    assert 1.0 < ended - float(result.stdout.removeprefix("stuck at ")) < 5.0
    assert line.removeprefix("error: ") in (tmp_path / "rank_00003.log").read_text()


def test_it_ends_a_process_that_cannot_say_so():
    """stderr is a full pipe that nobody reads."""
    body = """
watchdog._LAST_WORDS_SECONDS = 0.5
os.set_blocking(2, False)
try:
    while True:
        os.write(2, bytes(4096))
except BlockingIOError:
    os.set_blocking(2, True)
with watchdog.Watchdog(0.01, 0):
    stuck()
"""
    process = subprocess.Popen(script(body), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.wait(timeout=60) == 1
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def sigterm():
    """lost_ranks_named ignores it from an error on."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def raise_in_iteration_7(error: Exception) -> None:
    watchdog = Watchdog(10, rank=2)
    watchdog.beat("iteration 7")
    with lost_ranks_named(watchdog):
        raise error


PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] "
LOST = {
    "closed": RuntimeError(PAIR + "Connection closed by peer [10.0.0.1]:4"),
    "reset": RuntimeError(
        PAIR + "Read error [10.0.0.1]:4: Connection reset by peer. This is typically caused by a "
        "remote worker hanging"
    ),
    "timeout": RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 9000ms "
        "for recv operation to complete"
    ),
    "nccl": dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:2, remote process exited or there was a network error"
        "\nncclRemoteError: A call failed possibly due to a network error"
    ),
    "store": dist.DistStoreError("wait timeout after 9000ms, keys: /default_pg/0/1"),
}
NOT_LOST = {
    "user": UserError("--lr: no"),
    "training": TrainingError("no checkpoint to go back to"),
    "bug": RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    "file": RuntimeError("file closed"),
    "gloo's check": RuntimeError(
        "[enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:454] op.preamble.length <="
        " op.nbytes. 8 vs 4"
    ),
    "nccl's check": dist.DistBackendError("NCCL error: ncclInvalidUsage: Duplicate GPU detected"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_lost_rank_is_named(name, sigterm):
    with pytest.raises(TrainingError) as caught:
        raise_in_iteration_7(LOST[name])
    message = str(caught.value)
    assert message.startswith("rank 2: lost another rank in iteration 7: it died or hangs")
    assert "--load" in message and "--max-restarts" in message
    assert "\n" not in message and "pytorch" not in message and "typically" not in message
    assert caught.value.__cause__ is LOST[name]


@pytest.mark.parametrize("name", NOT_LOST)
def test_other_errors_stay_what_they_are(name):
    with pytest.raises(type(NOT_LOST[name])) as caught:
        raise_in_iteration_7(NOT_LOST[name])
    assert caught.value is NOT_LOST[name]


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
def test_minutes_must_be_a_time(minutes):
    sizes = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1"
    data = "--micro-batch-size 1 --train-iters 1 --data-path x --tokenizer-model x"
    with pytest.raises(UserError, match="--distributed-timeout-minutes"):
        parse_arguments(f"{sizes} {data} --distributed-timeout-minutes={minutes}".split())
