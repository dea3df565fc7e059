"""The pods that a cluster would make of the manifests in ``deploy/kubernetes``."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from support.running import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
KUBECTL = shutil.which("kubectl")
_BUILD_S = 60.0
# The oldest whose kustomize knows components, labels and patches with options.
_MIN_MINOR = 27

Document = dict[str, Any]


@functools.cache
def _minor_version() -> int:
    if KUBECTL is None:
        return 0
    words = [KUBECTL, "version", "--client"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_BUILD_S, check=False)
    found = re.search(r"v1\.(\d+)", done.stdout)
    return int(found[1]) if found else 0


@functools.cache
def build(name: str) -> list[Document]:
    """The documents of ``deploy/kubernetes/NAME``, as `kubectl apply -k` would send them.

    Skips the test where there is no kubectl.
    """
    if KUBECTL is None or _minor_version() < _MIN_MINOR:
        pytest.skip(f"needs kubectl 1.{_MIN_MINOR} or newer, which builds the overlays")
    done = subprocess.run(
        [KUBECTL, "kustomize", str(KUBERNETES / name)],
        capture_output=True,
        text=True,
        timeout=_BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def find(documents: list[Document], kind: str, name: str = "") -> Document:
    """The only document of this kind (and name)."""
    (found,) = [
        each
        for each in documents
        if each["kind"] == kind and name in ("", each["metadata"]["name"])
    ]
    return found


@dataclass(frozen=True, slots=True)
class Pod:
    """``hostname``: its name in the network; ``labels``: those that controllers add, too."""

    hostname: str
    labels: dict[str, str]
    spec: Document
    data: dict[str, Document]

    @property
    def container(self) -> Document:
        (only,) = self.spec["containers"]
        return only

    def environment(self) -> dict[str, str]:
        """The variables of its container, with references put in."""
        values: dict[str, str] = {}
        for variable in self.container.get("env", []):
            values[variable["name"]] = self._expand(self._value_of(variable), values)
        return values

    def command(self) -> list[str]:
        values = self.environment()
        words = [*self.container["command"], *self.container.get("args", [])]
        return [self._expand(word, values) for word in words]

    def _value_of(self, variable: Document) -> str:
        if "value" in variable:
            return str(variable["value"])
        (kind, source) = next(iter(variable["valueFrom"].items()))
        if kind == "configMapKeyRef":
            return str(self.data[source["name"]][source["key"]])
        assert kind == "fieldRef", kind
        if source["fieldPath"] == "metadata.name":
            return self.hostname
        (label,) = re.fullmatch(r"metadata\.labels\['(.+)'\]", source["fieldPath"]).groups()
        return self.labels[label]

    @staticmethod
    def _expand(text: str, values: dict[str, str]) -> str:
        """Replace references as Kubernetes does; one to a later variable stays as it is."""
        return re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], found[0]), text)


def _data(documents: list[Document]) -> dict[str, Document]:
    return {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"}


def lighthouse_pods(documents: list[Document]) -> list[Pod]:
    """The pods of the Deployment or the StatefulSet."""
    (workload,) = [d for d in documents if d["kind"] in ("Deployment", "StatefulSet")]
    spec = workload["spec"]
    template = spec["template"]
    hostnames = [
        f"lighthouse-{index}" if workload["kind"] == "StatefulSet" else "lighthouse"
        for index in range(spec["replicas"])
    ]
    labels = template["metadata"]["labels"]
    return [Pod(each, labels, template["spec"], _data(documents)) for each in hostnames]


def trainer_pods(documents: list[Document]) -> Iterator[Pod]:
    """The pods of the JobSet, with the labels that JobSet and the Jobs' controller add."""
    jobset = find(documents, "JobSet")
    name = jobset["metadata"]["name"]
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    template = spec["template"]
    for group in range(job["replicas"]):
        for index in range(spec["completions"]):
            labels = {
                **template["metadata"]["labels"],
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/job-index": str(group),
                "batch.kubernetes.io/job-completion-index": str(index),
            }
            hostname = f"{name}-{job['name']}-{group}-{index}"
            yield Pod(hostname, labels, template["spec"], _data(documents))


def verdict_on(jobset: Document, exit_code: int, *, disrupted: bool = False) -> str:
    """What the controllers do when the trainer of a pod has ended with this status.

    ``Complete``, ``Ignore`` (the Job replaces the pod), or the action of the JobSet.
    """
    if exit_code == 0:
        return "Complete"
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["backoffLimit"] == 0
    reason = "BackoffLimitExceeded"
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        conditions = {each["type"] for each in rule.get("onPodConditions", [])}
        matches = exit_code in codes["values"] if codes else disrupted and conditions
        if not matches:
            continue
        if rule["action"] == "Ignore":
            return "Ignore"
        assert rule["action"] == "FailJob", rule
        reason = "PodFailurePolicy"
        break
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        if reason in rule.get("onJobFailureReasons", [reason]):
            return str(rule["action"])
    return "RestartJobSet"
