"""A replica group of the public release, with one worker and default settings."""

import os
from typing import Any

from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from tools.benchmarks.children.workload import Training, build, shape_from_flags


def main() -> None:
    shape, flags = shape_from_flags()
    model, sgd = build(shape)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": sgd.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{flags.lighthouse}"
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"{flags.name}-",
        hostname="127.0.0.1",
    )
    Training(
        shape,
        DistributedDataParallel(manager, model),
        Optimizer(manager, sgd),
        current_step=manager.current_step,
        num_participants=manager.num_participants,
        close=manager.shutdown,
    ).obey()


if __name__ == "__main__":
    main()
