"""Runs the containers of pods as processes, each on a host of its own with the pod's name."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from support.hosts import Host, network
from support.pods import Pod
from support.programs import Program
from support.running import ROOT

# What an image has in its search path.
COMMANDS = {
    "lighthouse": [sys.executable, "-m", "torchft_svc.lighthouse_server"],
    "torchft-manager": [sys.executable, "-m", "torchft_svc.manager_server"],
    "python": [sys.executable],
}
# In namespaces of its own for mounts (made by `ip netns exec`), the host name and the network.
# Where this repository is in ``/tmp``, it is put there again.
_ENTER = """
echo "$0" > /proc/sys/kernel/hostname
mount -t tmpfs tmpfs /mnt
mkdir /mnt/volumes
mount --bind "$1" /mnt/volumes
mkdir /mnt/repository
mount --bind "$3" /mnt/repository
mount --bind "$2" /tmp
case "$3" in /tmp/*) mkdir -p "$3"; mount --bind /mnt/repository "$3";; esac
shift 3
exec "$@"
"""


class Cluster:
    """Hosts for pods; ``folder`` holds their file systems, as far as these differ."""

    def __init__(self, hosts: Mapping[str, Host], folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        self._volumes = folder / "volumes"
        self._volumes.mkdir()

    def address(self, name: str) -> str:
        """The address of the host with this name."""
        return self._hosts[name].address

    def folder_of(self, name: str) -> Path:
        """What the host sees as ``/tmp``."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def start(self, pod: Pod) -> Program:
        """Start the container of the pod; its volumes are folders that all pods share."""
        shutil.rmtree(self.folder_of(pod.hostname))  # a new container begins with an empty one
        place = self._volume_places(pod)
        environment = {name: place(value) for name, value in pod.environment().items()}
        return self.run(pod.hostname, [place(word) for word in pod.command()], environment)

    def run(
        self, name: str, command: list[str], environment: Mapping[str, str] | None = None
    ) -> Program:
        """Start a command on the host with this name."""
        namespace = self._hosts[name].namespace
        assert namespace is not None
        enter = ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-ec", _ENTER]
        places = [name.partition(".")[0], str(self._volumes), str(self.folder_of(name)), str(ROOT)]
        first, *others = command
        words = [*COMMANDS.get(first, [first]), *others]
        return Program([*enter, *places, *words], environment)

    def _volume_places(self, pod: Pod) -> Callable[[str], str]:
        """Return what replaces, in a text, where volumes are mounted by where they are here."""
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in pod.spec.get("volumes", [])
            if "persistentVolumeClaim" in volume
        }
        places: dict[str, str] = {}
        for mount in pod.container.get("volumeMounts", []):
            if mount["name"] in claims:
                claim = claims[mount["name"]]
                (self._volumes / claim).mkdir(exist_ok=True)
                places[mount["mountPath"]] = f"/mnt/volumes/{claim}"

        def replace(text: str) -> str:
            for path, place in places.items():
                text = text.replace(path, place)
            return text

        return replace


@contextlib.contextmanager
def cluster(names: Mapping[str, list[str]], folder: Path) -> Iterator[Cluster]:
    """Make a host for each of ``names``, which all find each other by these names and ``names``'
    aliases; skips the test where no namespace can be made.
    """
    if shutil.which("unshare") is None:
        pytest.skip("needs util-linux")
    with network(len(names)) as made, contextlib.ExitStack() as stack:
        hosts = dict(zip(names, made.others, strict=True))
        lines = ["127.0.0.1 localhost"]
        lines += [" ".join([host.address, name, *names[name]]) for name, host in hosts.items()]
        for host in hosts.values():
            assert host.namespace is not None
            place = Path("/etc/netns") / host.namespace  # `ip netns exec` mounts its files
            place.mkdir(parents=True)
            stack.callback(shutil.rmtree, place)
            (place / "hosts").write_text("\n".join(lines) + "\n")
        yield Cluster(hosts, folder)
