"""Tests that Kubernetes, JobSet and the Prometheus operator accept the manifests, and that their
parts fit each other and the programs that they start."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
from support.pods import Document, Pod, build, find, lighthouse_pods, trainer_pods, verdict_on
from support.running import ROOT

from torchft_svc.host.exit_verdict import DO_NOT_REQUEUE
from torchft_svc.lighthouse_server.cli import main as lighthouse

SCHEMAS = Path(__file__).parent / "schemas"
# The first one with all fields of the manifests as stable ones, and the newest that is known.
VERSIONS = ("1.31", kubernetes_validate.latest_version())
BUILDS = ("base", "overlays/etcd", "overlays/production")
pytestmark = pytest.mark.processes  # kubectl builds the overlays
CUSTOM = {"JobSet": "jobset", "ServiceMonitor": "service-monitor"}
NAME = "app.kubernetes.io/name"


def check_schema(document: Document) -> None:
    """Check a document as a cluster's API server would, unknown fields included."""
    kind = document["kind"]
    if kind in CUSTOM:
        jsonschema.validate(document, json.loads((SCHEMAS / f"{CUSTOM[kind]}.json").read_text()))
    if kind == "JobSet":
        for job in document["spec"]["replicatedJobs"]:
            spec = job["template"]["spec"]
            check_schema({"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": spec})
    if kind not in CUSTOM:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("name", BUILDS)
def test_every_document_fits_its_schema(name: str) -> None:
    documents = build(name)
    assert len(documents) >= 10
    for document in documents:
        check_schema(document)


def test_the_schemas_refuse_what_no_cluster_knows() -> None:
    jobset = json.loads(json.dumps(find(build("base"), "JobSet")))
    (job,) = jobset["spec"]["replicatedJobs"]
    wrong: list[tuple[Document, str, object]] = [
        (jobset["spec"]["failurePolicy"]["rules"][1], "action", "RestartGroup"),
        (jobset["spec"]["failurePolicy"], "maxRetries", 3),
        (job, "replicas", 2000),
        (job["template"]["spec"], "backofLimit", 0),
        (job["template"]["spec"]["template"]["spec"], "terminationGracePeriod", 60),
    ]
    check_schema(jobset)
    for place, key, value in wrong:
        before = dict(place)
        place[key] = value
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            check_schema(jobset)
        place.clear()
        place.update(before)


@pytest.mark.parametrize("name", BUILDS)
def test_whatever_selects_pods_finds_them(name: str) -> None:
    documents = build(name)
    pods = [*lighthouse_pods(documents), *trainer_pods(documents)]
    selectors = {
        (each["kind"], each["metadata"]["name"]): labels for each, labels in _selectors(documents)
    }
    assert len(selectors) >= 5
    for what, labels in selectors.items():
        assert [pod for pod in pods if labels.items() <= pod.labels.items()], what


def _selectors(documents: list[Document]) -> Iterator[tuple[Document, dict[str, str]]]:
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            yield document, spec["selector"]
        elif document["kind"] == "NetworkPolicy":
            yield document, spec["podSelector"]["matchLabels"]
        elif document["kind"] in ("PodDisruptionBudget", "Deployment", "StatefulSet"):
            yield document, spec["selector"]["matchLabels"]


@pytest.mark.parametrize("name", BUILDS)
def test_a_lighthouse_understands_its_flags(name: str) -> None:
    documents = build(name)
    pods = lighthouse_pods(documents)
    assert len(pods) == (1 if name == "base" else 3)
    known = {option for parameter in lighthouse.params for option in parameter.opts}
    for pod in pods:
        command, *words = pod.command()
        assert command == "lighthouse"
        assert {word.partition("=")[0] for word in words} <= known
        assert not [word for word in words if "$(" in word]
    advertised = [
        word.partition("=")[2]
        for pod in pods
        for word in pod.command()
        if word.startswith("--advertise=")
    ]
    if advertised:  # the trainers know each lighthouse by the name that it gives of itself
        (trainer, *_) = trainer_pods(documents)
        assert trainer.environment()["TORCHFT_LIGHTHOUSE"].split(",") == advertised


@pytest.mark.parametrize("name", BUILDS)
def test_a_service_leads_to_ports_that_are_served(name: str) -> None:
    documents = build(name)
    (container, *_) = [pod.container for pod in lighthouse_pods(documents)]
    binds = {
        int(word.rpartition(":")[2])
        for word in container["args"]
        if word.partition("=")[0] in ("--bind", "--http-bind")
    }
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert set(ports.values()) == binds
    for service in (each for each in documents if each["kind"] == "Service"):
        assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports.keys()
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["grpc"]["port"] == ports["grpc"]
    for monitor in (each for each in documents if each["kind"] == "ServiceMonitor"):
        selected = monitor["spec"]["selector"]["matchLabels"].items()
        labels = find(documents, "Service", "lighthouse")["metadata"]["labels"]
        assert selected <= labels.items()
        assert {each["port"] for each in monitor["spec"]["endpoints"]} <= ports.keys()


def test_groups_have_names_and_addresses_of_their_own() -> None:
    documents = build("base")
    jobset = find(documents, "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pods = list(trainer_pods(documents))
    environments = [pod.environment() for pod in pods]
    assert [each["REPLICA_GROUP_ID"] for each in environments] == ["group-0", "group-1", "group-2"]
    for pod, variables in zip(pods, environments, strict=True):
        assert variables["TORCHFT_JOB_ID"] == jobset["metadata"]["name"]
        assert int(variables["WORLD_SIZE"]) == spec["parallelism"] == spec["completions"]
        rank_0 = f"{pod.hostname.rpartition('-')[0]}-0"
        assert variables["MASTER_ADDR"] == f"{rank_0}.{jobset['metadata']['name']}"
        assert len(pod.hostname) < 64
    budget = find(documents, "PodDisruptionBudget", "training")["spec"]
    assert budget["minAvailable"] == job["replicas"] - 1
    assert int(environments[0]["TORCHFT_MIN_REPLICAS"]) <= budget["minAvailable"]


def test_every_end_of_a_trainer_has_its_consequence() -> None:
    documents = build("base")
    jobset = find(documents, "JobSet")
    (trainer, *_) = trainer_pods(documents)
    drained = int(trainer.environment()["TORCHFT_DRAINED_EXIT_CODE"])
    final = int(trainer.environment()["TORCHFT_DO_NOT_REQUEUE_EXIT_CODE"])
    assert final == DO_NOT_REQUEUE
    verdicts = {
        "the training is done": verdict_on(jobset, 0),
        "an error": verdict_on(jobset, 1),
        "SIGKILL, or out of memory": verdict_on(jobset, 137),
        "drained by an operator": verdict_on(jobset, drained),
        "its node is drained": verdict_on(jobset, drained, disrupted=True),
        "the same, in vain": verdict_on(jobset, 137, disrupted=True),
        "an error that no restart mends": verdict_on(jobset, final),
        "the same, on a node that is drained": verdict_on(jobset, final, disrupted=True),
    }
    assert verdicts == {
        "the training is done": "Complete",
        "an error": "RestartJob",
        "SIGKILL, or out of memory": "RestartJob",
        "drained by an operator": "RestartJob",
        "its node is drained": "Ignore",
        "the same, in vain": "Ignore",
        "an error that no restart mends": "FailJobSet",
        "the same, on a node that is drained": "FailJobSet",
    }


def test_the_program_knows_of_its_end_before_its_pod_ends() -> None:
    (trainer, *_) = trainer_pods(build("base"))
    grace_s = float(trainer.environment()["TORCHFT_GRACE_SEC"])
    assert 0 < grace_s < trainer.spec["terminationGracePeriodSeconds"]
    assert trainer.container["command"][0] == "python", "a shell would not pass SIGTERM on"


def test_the_token_reaches_everybody() -> None:
    documents = build("overlays/production")
    pods: list[Pod] = [*lighthouse_pods(documents), *trainer_pods(documents)]
    for pod in pods:
        named = [word.partition("=")[2] for word in pod.command() if "token" in word]
        named += [pod.environment().get("TORCHFT_TOKEN_FILE", "")]
        (path,) = filter(None, named)
        (mount,) = [m for m in pod.container["volumeMounts"] if path.startswith(m["mountPath"])]
        (volume,) = [v for v in pod.spec["volumes"] if v["name"] == mount["name"]]
        assert volume["secret"]["secretName"] == "torchft-token"


def test_pods_may_do_no_more_than_the_namespace_allows() -> None:
    """The namespace enforces the profile `restricted`."""
    documents = build("base")
    labels = find(documents, "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in (*lighthouse_pods(documents), *trainer_pods(documents)):
        assert pod.spec["securityContext"]["runAsNonRoot"]
        assert pod.spec["securityContext"]["runAsUser"] > 0
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod.container["securityContext"]["allowPrivilegeEscalation"]
        assert pod.container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_images_are_those_that_the_dockerfile_builds() -> None:
    documents = build("base")
    text = (ROOT / "docs" / "clusters.md").read_text()
    for pod in (*lighthouse_pods(documents), *trainer_pods(documents)):
        image = pod.container["image"].partition(":")[0]
        assert re.search(rf"docker build .*-t {image} ", text), image
