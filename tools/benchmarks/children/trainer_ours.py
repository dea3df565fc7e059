"""A worker of a replica group of ours, with default settings; usually its only one."""

from typing import Any

from torch import nn
from torch.distributed import TCPStore

from tools.benchmarks.children.stopwatch import Stopwatch
from tools.benchmarks.children.workload import Training, build, shape_from_flags
from tools.demo.torch_wrapper import torch_data_parallel
from torchft_svc.client import (
    DistributedDataParallel,
    Manager,
    OptimizerWrapper,
)

_HOST = "127.0.0.1"


def wrapped(wrapper: str, manager: Manager, model: nn.Module) -> nn.Module:
    """``model``, averaged by ``wrapper``; as it is where nothing wraps it."""
    if wrapper == "ours":
        return DistributedDataParallel(manager, model)
    if wrapper == "none":
        return model
    return torch_data_parallel(manager, model)


def _store(port: int) -> TCPStore:
    """Serve this group's store on ``port``."""
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False)


def main() -> None:
    shape, flags = shape_from_flags()
    model, sgd = build(shape)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": sgd.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    place: dict[str, Any] = {}
    if flags.group_size > 1:
        place = {
            "rank": flags.rank,
            "world_size": flags.group_size,
            "store_addr": _HOST,
            "store_port": flags.store_port,
        }
    # Kept until the end of the program.
    store = _store(flags.store_port) if place and flags.rank == 0 else None
    if flags.spare:  # else not named: a revision before prepared spares does not know it
        place["spare"] = True
    watch = Stopwatch()
    manager = Manager(
        state_dict=state_dict,
        load_state_dict=load_state_dict,
        lighthouse_addr=flags.lighthouse,
        replica_id=flags.name,
        **place,
    )

    def average() -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for work in [manager.allreduce(gradient) for gradient in gradients]:
            work.wait()

    Training(
        shape,
        wrapped(flags.wrapper, manager, model),
        OptimizerWrapper(manager, sgd),
        current_step=manager.current_step,
        num_participants=manager.num_participants,
        close=manager.shutdown,
        lap=watch.lap,
        **({"average": average} if flags.wrapper == "none" else {}),
    ).obey()
    del store


if __name__ == "__main__":
    main()
