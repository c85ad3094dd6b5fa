"""examples/launch/kubernetes.yaml: what the API knows, and what fits together.

The schema is that of Kubeflow Trainer's Python models, which hold JobSet's API and Kubernetes'.
"""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_run import ROOT, arguments_for, steps
from torch.distributed.run import get_args_parser
from waiting import STOPPED, loaded, said, trained, until

from megatron_lowbit.arguments import front_parser
from megatron_lowbit.command_line import expand_files

DOCUMENTS = list(yaml.safe_load_all((ROOT / "examples/launch/kubernetes.yaml").read_text()))
BY_KIND = {document["kind"]: document for document in DOCUMENTS}
CLAIM, JOB_SET = BY_KIND["PersistentVolumeClaim"], BY_KIND["JobSet"]
WORKERS = JOB_SET["spec"]["replicatedJobs"][0]
JOB = WORKERS["template"]["spec"]
POD = JOB["template"]["spec"]
CONTAINER = POD["containers"][0]


def parsed():
    """Parse the container's arguments as torchrun does, its node's number filled in."""
    arguments = [a.replace("$(JOB_COMPLETION_INDEX)", "1") for a in CONTAINER["args"]]
    return get_args_parser().parse_args(arguments)


@pytest.mark.parametrize(
    ("document", "model"),
    [(JOB_SET, "JobsetV1alpha2JobSet"), (CLAIM, "IoK8sApiCoreV1PersistentVolumeClaim")],
)
def test_the_api_knows_every_field(document, model):
    """The models check types and what is required; they leave out what they do not know."""
    from kubeflow_trainer_api import models  # takes 2 s in each process that collects tests

    assert getattr(models, model).from_dict(document).to_dict() == document


def test_torchrun_meets_where_the_first_pod_is():
    """JobSet's names for pods: SET-JOB-REPLICA-INDEX, in a service of the set's name."""
    told = parsed()
    name = JOB_SET["metadata"]["name"]
    assert told.master_addr == f"{name}-{WORKERS['name']}-0-0.{name}"
    assert told.nnodes == str(JOB["parallelism"]) and JOB["completions"] == JOB["parallelism"]
    assert WORKERS["replicas"] == 1 and JOB["completionMode"] == "Indexed"
    assert told.nproc_per_node == CONTAINER["resources"]["limits"]["nvidia.com/gpu"]


def test_training_takes_its_arguments_and_resumes(monkeypatch):
    monkeypatch.chdir(ROOT)
    told = parsed()
    assert (ROOT / told.training_script).is_file()
    args = front_parser().parse_args(expand_files(told.training_script_args))
    assert args.save == args.load and args.save_interval and args.exit_signal_handler
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    for path in (args.save, *args.data_path, args.tokenizer_model):
        assert str(path).startswith(f"{mounts['lowbit']}/")


def test_volumes_exist():
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["lowbit"]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert mounts["shared-memory"] == "/dev/shm"
    assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"


def test_a_failure_starts_all_again():
    """A pod failure policy needs restartPolicy Never; pods that come back alone would hang."""
    assert POD["restartPolicy"] == "Never" and JOB["backoffLimit"] == 0
    assert JOB_SET["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert POD["terminationGracePeriodSeconds"] > 30  # what torchrun waits before it kills


def command_of(index: int, port: int, training: list[str]) -> list[str]:
    """Run one node's command of the manifest on this machine, with other training arguments."""
    here = {"--nproc-per-node": "1", "--master-addr": "127.0.0.1"}
    here |= {"--node-rank": str(index), "--master-port": str(port)}
    script = CONTAINER["args"].index("pretrain_gpt.py")
    options = [argument.partition("=") for argument in CONTAINER["args"][:script]]
    launcher = [f"{name}={here.get(name, value)}" for name, _, value in options]
    return [sys.executable, *CONTAINER["command"][1:], *launcher, "pretrain_gpt.py", *training]


def log_of(folder: Path, index: int) -> Path:
    return folder.with_suffix(f".{index}.log")


@pytest.fixture
def start(corpus, launch):
    """Starts the tiny model on both nodes."""

    def pods(folder: Path) -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        more = ["--train-iters", "100", "--save-interval", "50", "--exit-signal-handler"]
        own = arguments_for(corpus, ("--save", folder, "--load", folder, *more))
        return [launch(command_of(n, port, own), log_of(folder, n)) for n in range(2)]

    return pods


@pytest.mark.slow
def test_a_pod_that_is_taken_away_loses_nothing(start, tmp_path):
    """Both nodes save when one of them is told to go, and go on when both begin again."""
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    log = log_of(stopped, 0)
    pods = start(stopped)
    last = log_of(stopped, 1)  # the last rank prints iterations
    until(lambda: trained(last, 3), last)
    pods[1].terminate()
    assert pods[1].wait(timeout=60) != 0  # to Kubernetes a failure, for a reason that it knows
    until(lambda: STOPPED in said(log), log)
    # The set begins again. torchrun waits for its other nodes, deaf, until the pod's time is up.
    pods[0].kill()
    for folder in (stopped, whole):
        assert [pod.wait(timeout=180) for pod in start(folder)] == [0, 0], said(log)[-3000:]
    assert loaded(log, stopped)
    assert steps(stopped) == steps(whole) and len(steps(whole)) == 100
