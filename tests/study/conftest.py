"""Studies of a training script that only writes a log, a checkpoint and its tracker file."""

from collections.abc import Callable
from pathlib import Path

import pytest

TRAINING = """
import json, signal, sys, time
from pathlib import Path
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder, seed = Path(arguments["--save"]), int(arguments["--seed"])
tracker = folder / "latest_checkpointed_iteration.txt"
begin = int(tracker.read_text()) if arguments.get("--load") == str(folder) else 0
if "--ckpt-step" in arguments:
    begin = int(arguments["--ckpt-step"])
    assert (Path(arguments["--load"]) / f"iter_{begin:07}").is_dir()
# As Megatron-LM ends on a signal: with a checkpoint, and with success.
def leave(*_):
    tracker.write_text("7")
    sys.exit()
signal.signal(signal.SIGTERM, leave)
with (folder / "metrics.jsonl").open("a") as file:
    for i in range(begin + 1, 41):
        record = {"iteration": i, "lm_loss": float(arguments["--scale"]) + seed / i, "began": begin,
                  "consumed_tokens": i, "tokens_per_second": 1.0, "more": arguments.get("--more")}
        file.write(json.dumps(record) + chr(10))
        file.flush()
        if i == int(arguments.get("--save-interval", 0)):
            (folder / f"iter_{i:07}").mkdir()
            tracker.write_text(str(i))
        time.sleep(float(arguments["--sleep"]))
(folder / "iter_0000040").mkdir()
tracker.write_text("40")
sys.exit(int(arguments.get("--code", 0)))
"""


@pytest.fixture
def write_script(tmp_path) -> Callable[..., None]:
    """Writes the training script, with a text of it replaced."""

    def write(old: str = "", new: str = "") -> None:
        assert old in TRAINING
        (tmp_path / "train.py").write_text(TRAINING.replace(old, new) if old else TRAINING)

    return write


@pytest.fixture
def study(tmp_path, write_script) -> Callable[..., Path]:
    """Writes the script and a study of two seeds of it: names and arguments of the runs."""
    write_script()

    def write(sleep: float = 0.0, branch: str = "", **runs: str) -> Path:
        file = tmp_path / "some-study.yaml"
        lines = "".join(f"  {name}: {arguments}\n" for name, arguments in runs.items())
        file.write_text(
            f"script: {tmp_path}/train.py\narguments: --sleep {sleep}\nseeds: [1, 2]\n"
            f"runs:\n{lines}{branch}"
        )
        return file

    return write
