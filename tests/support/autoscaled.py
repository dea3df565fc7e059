"""A run on Ray with too little room, whose missing worker Ray's own autoscaler makes room for.

Its cloud is Ray's fake one: a node is a process. The head's address is the one that this knows.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from torch import nn

from support.trained import BATCH_SIZE, model, optimizer, samples
from torchft_svc.trainer import TrainContext, Trainer

HEAD = "127.0.0.1:6379"
LONG_S = 150.0
MAX_PASSES = 200
_HEAD_ID = "f" * 51 + "00000"
_LISTS = (
    "cluster_synced_files rsync_exclude initialization_commands setup_commands head_setup_commands "
    "worker_setup_commands head_start_ray_commands worker_start_ray_commands"
)
CONFIG: dict[str, Any] = {
    "cluster_name": "fake",
    "max_workers": 1,
    "provider": {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "head_node_id": _HEAD_ID,
        "gcs_address": HEAD,
    },
    "head_node_type": "ray.head.default",
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "cpu": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 1},
    },
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 5.0,
    "auth": {},
    "file_mounts": {},
    "file_mounts_sync_continuously": False,
    **{name: [] for name in _LISTS.split()},
}


def train_until_there_are_two(context: TrainContext) -> int:
    net = model({})
    net, steps = context.prepare(net, optimizer(net, {}))
    while context.world_size < 2 and context.position.epoch < MAX_PASSES:
        for features, target in context.batches(samples(), BATCH_SIZE):
            time.sleep(0.05)
            steps.zero_grad()
            nn.functional.mse_loss(net(features), target).backward()
            steps.step()
        context.report()
    return context.world_size


def main() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        json.dump(CONFIG, config)
        config.flush()
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--num-cpus=1"]
        command += [f"--autoscaling-config={config.name}", "--include-dashboard=false"]
        variables = {
            **os.environ,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
        }
        address = "--node-ip-address=127.0.0.1"
        subprocess.run(
            [*command, address],
            env=variables,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=LONG_S,
        )
        ray.init(HEAD, logging_level=logging.ERROR)
        with Trainer(
            train_until_there_are_two, num_workers=2, backend="ray", grow_every_s=0.5
        ) as trainer:
            found = trainer.train(max_retries=0)
    for each in found["incidents"]:
        print("incident", each.rung, each.source, each.num_workers, each.lost_steps, flush=True)
    print("workers", found["result"], "retries", found["retries"], flush=True)


if __name__ == "__main__":
    main()
