"""A run on Ray with a worker on each of two nodes, whose network is cut and comes back.

Runs in the first of two network namespaces: see tests/trainer/test_ray_namespaces.py. Arguments:
the namespaces, and the address in each.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import ray
from torch import nn

from support.running import eventually
from support.trained import BATCH_SIZE, model, optimizer, samples
from torchft_svc.trainer import TrainContext, Trainer
from torchft_svc.trainer.ray_backend import RayBackend

PORT = 26379
LONG_S = 150.0


def node(namespace: str, *arguments: str) -> None:
    """Start one; its processes stay until somebody ends all of the namespace."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--num-cpus=1"]
    inside = ["ip", "netns", "exec", namespace, *command, *arguments]
    subprocess.run(inside, check=True, stdout=subprocess.DEVNULL, timeout=LONG_S)


def link(namespace: str, state: str) -> None:
    command = ["ip", "-n", namespace, "link", "set", "cut", state]
    subprocess.run(command, check=True, timeout=LONG_S)


def train_until_both_are_back(context: TrainContext) -> int:
    net, steps = context.prepare(net := model({}), optimizer(net, {}))
    while context.position.epoch < 3 or context.world_size < 2:
        for features, target in context.batches(samples(), BATCH_SIZE):
            time.sleep(0.05)
            steps.zero_grad()
            nn.functional.mse_loss(net(features), target).backward()
            steps.step()
        context.report()
    return context.position.step


def main(first: str, second: str, *hosts: str) -> None:
    head = [f"--node-ip-address={hosts[0]}", f"--port={PORT}", "--include-dashboard=false"]
    node(first, "--head", *head)
    node(second, f"--address={hosts[0]}:{PORT}", f"--node-ip-address={hosts[1]}")
    ray.init(f"{hosts[0]}:{PORT}", _node_ip_address=hosts[0], logging_level=logging.ERROR)
    trainer = Trainer(
        train_until_both_are_back,
        num_workers=2,
        backend=RayBackend(strategy="SPREAD"),
        heartbeat_timeout_s=6.0,
        first_pause_s=0.2,
        max_pause_s=1.0,
        grow_every_s=0.5,
    )

    def cut() -> None:
        eventually(lambda: trainer.position.step >= 4, LONG_S)
        link(second, "down")
        eventually(lambda: any(each.until_s for each in trainer.history.incidents), LONG_S)
        link(second, "up")

    cutting = threading.Thread(target=cut, name="cut", daemon=True)
    cutting.start()
    with trainer:
        found = trainer.train(max_retries=1)
    for each in found["incidents"]:
        fields = each.rung, each.source, each.num_workers, each.lost_steps
        print("incident", *fields, *filter(None, [each.why_not_peer]), flush=True)
    print("retries", found["retries"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
