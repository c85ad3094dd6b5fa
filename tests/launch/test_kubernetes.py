"""examples/launch/kubernetes.yaml: what the API knows, and what fits together.

The schema comes from Kubeflow Trainer's Python models, which hold JobSet's API and Kubernetes'.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nodes
import psutil
import pytest
import torch
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

on_two_nodes = pytest.mark.skipif(nodes.missing() is not None, reason=f"{nodes.missing()}")


def parsed():
    """Parse the container's arguments as torchrun does, its node's number filled in."""
    arguments = [a.replace("$(JOB_COMPLETION_INDEX)", "1") for a in CONTAINER["args"]]
    return get_args_parser().parse_args(arguments)


@pytest.mark.parametrize(
    ("document", "model"),
    [(JOB_SET, "JobsetV1alpha2JobSet"), (CLAIM, "IoK8sApiCoreV1PersistentVolumeClaim")],
)
def test_the_api_knows_every_field(document, model):
    """The models check types and what is required; they ignore what they do not know."""
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


def command_of(index: int, training: list[str], processes: int = 1) -> list[str]:
    """Return one node's command of the manifest, with its processes and training arguments."""
    own = CONTAINER["args"][: CONTAINER["args"].index("pretrain_gpt.py")]
    launcher = [a.replace("$(JOB_COMPLETION_INDEX)", str(index)) for a in own]
    # The last option counts.
    script = [*launcher, f"--nproc-per-node={processes}", "pretrain_gpt.py"]
    return [sys.executable, *CONTAINER["command"][1:], *script, *training]


def log_of(folder: Path, index: int) -> Path:
    return folder.with_suffix(f".{index}.log")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[list[nodes.Node]]:
    """Two nodes with the names of the set's pods; a node ends with its torchrun, as a pod does."""
    name = JOB_SET["metadata"]["name"]
    with nodes.two_nodes(*(f"{name}-{WORKERS['name']}-0-{n}.{name}" for n in range(2))) as made:
        yield made


@pytest.fixture(scope="module")
def start(corpus, launch, two_nodes):
    """Starts the tiny model on both nodes."""

    def pods(folder: Path) -> list[subprocess.Popen]:
        more = ["--train-iters", "100", "--save-interval", "20", "--exit-signal-handler"]
        own = arguments_for(corpus, ("--save", folder, "--load", folder, *more))
        commands = [node.alone(command_of(n, own)) for n, node in enumerate(two_nodes)]
        return [launch(command, log_of(folder, n)) for n, command in enumerate(commands)]

    return pods


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory) -> dict:
    """Loss and gradient norm of each iteration of a run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    assert [pod.wait(timeout=300) for pod in start(folder)] == [0, 0], said(log_of(folder, 0))
    assert len(steps(folder)) == 100
    return steps(folder)


def begins_again(pods: list[subprocess.Popen], start, folder: Path, whole: dict) -> None:
    """Check that the set, begun again, trains as if nothing had stopped it."""
    # torchrun waits for its other nodes, deaf, until its pod's time is up.
    for pod in pods:
        pod.kill()
        pod.wait()
    log = log_of(folder, 0)
    assert [pod.wait(timeout=300) for pod in start(folder)] == [0, 0], said(log)[-3000:]
    assert loaded(log, folder)
    assert steps(folder) == whole


@pytest.mark.slow
@on_two_nodes
def test_a_pod_that_is_taken_away_loses_nothing(start, whole, tmp_path):
    """Both nodes save when one of them is told to go, and go on when both begin again."""
    log, last = log_of(tmp_path, 0), log_of(tmp_path, 1)  # the last rank prints iterations
    pods = start(tmp_path)
    until(lambda: trained(last, 3), last)
    psutil.Process(pods[1].pid).children()[0].terminate()
    assert pods[1].wait(timeout=60) != 0  # to Kubernetes a failure, for a reason that it knows
    until(lambda: STOPPED in said(log), log)
    begins_again(pods, start, tmp_path, whole)


@pytest.mark.slow
@on_two_nodes
@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_pod_loses_only_what_came_after_the_checkpoint(start, whole, tmp_path, index):
    """The other node's ranks fail by themselves, also where the killed one had the store."""
    last, survivor = log_of(tmp_path, 1), log_of(tmp_path, 1 - index)
    pods = start(tmp_path)
    until(lambda: trained(last, 23), last)
    psutil.Process(pods[index].pid).children()[0].kill()
    until(lambda: "failed (exitcode: 1)" in said(survivor), survivor, seconds=60)
    assert not trained(last, 100)
    begins_again(pods, start, tmp_path, whole)


@pytest.mark.gpu
def test_a_killed_pod_on_gpus_loses_only_what_came_after_the_checkpoint(corpus, launch, tmp_path):
    """Two pods of one or two GPUs, which they share: to NCCL two hosts, joined by TCP."""
    processes = min(2, torch.cuda.device_count())

    def start(folder: Path) -> list[subprocess.Popen]:
        own = "--bf16 --micro-batch-size 1 --train-iters 60"
        own += f" --save-interval 20 --exit-signal-handler --save {folder} --load {folder}"
        training = arguments_for(corpus, tuple(own.split()))
        commands = [command_of(n, training, processes) for n in range(2)]
        # A host does not know the names of a cluster.
        local = [[a.replace(parsed().master_addr, "localhost") for a in c] for c in commands]
        return [
            launch(command, log_of(folder, n), NCCL_HOSTID=f"pod-{n}", NCCL_DEBUG="INFO")
            for n, command in enumerate(local)
        ]

    whole = tmp_path / "whole"
    assert [pod.wait(timeout=300) for pod in start(whole)] == [0, 0], said(log_of(whole, 0))[-5000:]
    assert "via NET/Socket" in said(log_of(whole, 1)) and len(steps(whole)) == 60
    killed = tmp_path / "killed"
    last = log_of(killed, 1)
    pods = start(killed)
    until(lambda: trained(last, 23), last)
    torchrun = psutil.Process(pods[0].pid)
    for process in [torchrun, *torchrun.children(recursive=True)]:
        process.kill()
    # Its ranks would end two minutes later; a JobSet does not wait for them.
    until(lambda: "remote process exited" in said(last), last, seconds=60)
    assert not trained(last, 60)
    begins_again(pods, start, killed, steps(whole))
