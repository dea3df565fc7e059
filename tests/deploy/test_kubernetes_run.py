"""Runs what the manifests say, as processes with a host each: a killed trainer heals, a killed
leader is replaced."""

from __future__ import annotations

import copy
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.cluster_hosts import Cluster, cluster
from support.etcd_server import ETCD, needs_etcd
from support.pods import Document, Pod, build, find, lighthouse_pods, trainer_pods, verdict_on
from support.programs import Program
from support.running import eventually

from torchft_svc.rpc.channel import open_channel

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
# A trainer imports torch, on few cores that may be busy with other work.
START_S = 150.0
CALL_S = 5.0
SERVING = health_pb2.HealthCheckResponse.SERVING


def probe(hosts: Cluster, pod: Pod, kind: str) -> bool:
    """Whether the pod passes its probe of this kind."""
    wanted = pod.container[kind]
    if "exec" in wanted:
        test, flag, path = wanted["exec"]["command"]
        assert (test, flag, path.rpartition("/")[0]) == ("test", "-e", "/tmp")  # noqa: S108
        return (hosts.folder_of(pod.hostname) / Path(path).name).exists()
    service = wanted["grpc"].get("service", "")
    return serves(f"{hosts.address(pod.hostname)}:{wanted['grpc']['port']}", service)


def serves(address: str, service: str) -> bool:
    with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=CALL_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == SERVING)


def wait_for_groups(programs: list[Program], count: int) -> None:
    """Wait until each prints a step of so many groups that it has not printed before."""
    for program in programs:
        print(*program.read_so_far(), sep="\n")  # shown if the test fails
        program.lines.clear()
    for program in programs:
        program.wait_until(lambda line: line.endswith(f"groups {count}"), str(count), START_S)


def name_of(pod: Pod) -> str:
    """The name under which others know a pod of the JobSet."""
    return f"{pod.hostname}.{pod.labels['jobset.sigs.k8s.io/jobset-name']}"


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Cluster]:
    documents = build("base")
    names = {"lighthouse": [find(documents, "Service")["metadata"]["name"]]}
    names |= {pod.hostname: [name_of(pod)] for pod in trainer_pods(documents)}
    with cluster(names, tmp_path) as hosts:
        yield hosts


def test_a_training_of_the_base_loses_a_trainer(base: Cluster) -> None:
    documents = build("base")
    jobset = find(documents, "JobSet")
    (lighthouse,) = lighthouse_pods(documents)
    pods = list(trainer_pods(documents))
    with ExitStack() as stack:
        stack.enter_context(base.start(lighthouse))
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            eventually(lambda kind=kind: probe(base, lighthouse, kind), START_S, kind)
        # One is started as everywhere; the others, in no time.
        programs = [stack.enter_context(base.start(pod, warm=pod != pods[0])) for pod in pods]
        wait_for_groups(programs, 3)
        for pod in pods:
            eventually(lambda pod=pod: probe(base, pod, "readinessProbe"), what=pod.hostname)

        victim, others = programs[1], [programs[0], programs[2]]
        victim.signal(signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL
        wait_for_groups(others, 2)
        assert verdict_on(jobset, 128 + signal.SIGKILL) == "RestartJob"
        programs[1] = stack.enter_context(base.start(pods[1], warm=True))
        programs[1].wait_for("healed to step", START_S)
        wait_for_groups(programs, 3)

        status = base.run("lighthouse", ["lighthouse", "status", "--job-id=training"])
        with status:
            assert status.wait() == 0
        text = "\n".join(status.lines)
        assert "job training: quorum" in text
        assert all(f"group-{index}" in text for index in range(3)), text
        page = f"http://{base.address('lighthouse')}:29580/metrics"
        with urllib.request.urlopen(page, timeout=CALL_S) as answer:
            assert b"torchft_committed_step{" in answer.read()

        drained = programs[2]
        drained.signal(signal.SIGTERM)
        code = drained.wait()
        assert str(code) == pods[2].environment()["TORCHFT_DRAINED_EXIT_CODE"]
        assert verdict_on(jobset, code, disrupted=True) == "Ignore"
        wait_for_groups(programs[:2], 2)
        assert not [line for each in programs[:2] for line in each.lines if "discarded" in line]


def with_groups_of_two(documents: list[Document]) -> list[Document]:
    """Two groups of two pods each, changed as docs/clusters.md says."""
    changed = copy.deepcopy(documents)
    (job,) = find(changed, "JobSet")["spec"]["replicatedJobs"]
    job["replicas"] = 2
    spec = job["template"]["spec"]
    spec["parallelism"] = spec["completions"] = 2
    (container,) = spec["template"]["spec"]["containers"]
    (world_size,) = [each for each in container["env"] if each["name"] == "WORLD_SIZE"]
    world_size["value"] = "2"
    return changed


@pytest.fixture
def elected(tmp_path: Path) -> Iterator[Cluster]:
    documents = with_groups_of_two(build("overlays/etcd"))
    names = {
        pod.hostname: [f"{pod.hostname}.each-lighthouse"] for pod in lighthouse_pods(documents)
    }
    names |= {pod.hostname: [name_of(pod)] for pod in trainer_pods(documents)}
    with cluster({**names, "etcd": []}, tmp_path) as hosts:
        yield hosts


@needs_etcd
def test_a_training_with_elected_lighthouses_loses_the_leader(elected: Cluster) -> None:
    documents = with_groups_of_two(build("overlays/etcd"))
    lighthouses = lighthouse_pods(documents)
    pods = list(trainer_pods(documents))
    assert [pod.environment()["RANK"] for pod in pods] == ["0", "1", "0", "1"]
    with ExitStack() as stack:
        etcd = [str(ETCD), "--listen-client-urls=http://0.0.0.0:2379", "--data-dir=/tmp/etcd"]
        etcd += ["--advertise-client-urls=http://etcd:2379"]
        stack.enter_context(elected.run("etcd", etcd))
        running = {pod.hostname: stack.enter_context(elected.start(pod)) for pod in lighthouses}

        def leaders() -> list[str]:
            return [
                name
                for name in running
                if serves(f"{elected.address(name)}:29510", "torchft.LighthouseService")
            ]

        for pod in lighthouses:
            eventually(lambda pod=pod: probe(elected, pod, "readinessProbe"), START_S)
        eventually(lambda: len(leaders()) == 1, START_S, "one is elected")
        programs = [stack.enter_context(elected.start(pod, warm=True)) for pod in pods]
        wait_for_groups(programs, 2)

        (first,) = leaders()
        running.pop(first).signal(signal.SIGKILL)
        wait_for_groups(programs, 2)  # these steps ask nobody
        eventually(lambda: len(leaders()) == 1, START_S, "another one is elected")

        # One of its pods has failed: so has the Job, which ends the other one and starts again.
        victim, other = programs[2:]
        victim.signal(signal.SIGKILL)
        other.signal(signal.SIGTERM)
        victim.wait()
        assert other.wait() != 0
        programs[2:] = [stack.enter_context(elected.start(pod, warm=True)) for pod in pods[2:]]
        for program in programs[2:]:
            program.wait_for("healed to step", START_S)
        wait_for_groups(programs, 2)
