"""Runs the containers of pods as processes, each on a host of its own with the pod's name."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from support.fork_server import Place
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
# In namespaces of its own for mounts, the host name and the network. Where this repository is in
# ``/tmp``, it is put there again.
_PREPARE = """
echo "$0" > /proc/sys/kernel/hostname
mount -t tmpfs tmpfs /mnt
mkdir /mnt/volumes
mount --bind "$1" /mnt/volumes
mkdir /mnt/repository
mount --bind "$3" /mnt/repository
mount --bind "$2" /tmp
case "$3" in /tmp/*) mkdir -p "$3"; mount --bind /mnt/repository "$3";; esac
"""
_START = """
shift 3
exec "$@"
"""
# What `ip netns exec` does after it has made the namespace for mounts.
_AS_IP_DOES = """
mount --make-rslave /
umount -l /sys || true
mount -t sysfs sysfs /sys
for file in /etc/netns/"$4"/*; do mount --bind "$file" "/etc/${file##*/}"; done
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

    def start(self, pod: Pod, *, warm: bool = False) -> Program:
        """Start the container of the pod; its volumes are folders that all pods share.

        ``warm``: its program has imported torch before.
        """
        shutil.rmtree(self.folder_of(pod.hostname))  # a new container begins with an empty one
        place = self._volume_places(pod)
        environment = {name: place(value) for name, value in pod.environment().items()}
        command = [place(word) for word in pod.command()]
        return self.run(pod.hostname, command, environment, warm=warm)

    def run(
        self,
        name: str,
        command: list[str],
        environment: Mapping[str, str] | None = None,
        *,
        warm: bool = False,
    ) -> Program:
        """Start a command on the host with this name."""
        namespace = self._hosts[name].namespace
        assert namespace is not None
        places = [name.partition(".")[0], str(self._volumes), str(self.folder_of(name)), str(ROOT)]
        first, *others = command
        words = [*COMMANDS.get(first, [first]), *others]
        if warm:
            prepare = ["sh", "-ec", _AS_IP_DOES + _PREPARE, *places, namespace]
            place = Place(namespace, prepare)
            return Program(words, environment, warm=True, forks_programs=True, place=place)
        enter = ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-ec"]
        return Program([*enter, _PREPARE + _START, *places, *words], environment)

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
