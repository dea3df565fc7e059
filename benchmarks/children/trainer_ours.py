"""A replica group of ours, with one worker and default settings."""

from typing import Any

from benchmarks.children.stopwatch import Stopwatch
from benchmarks.children.workload import Training, build, shape_from_flags
from torchft_svc.client import DistributedDataParallel, Manager, OptimizerWrapper


def main() -> None:
    shape, flags = shape_from_flags()
    model, sgd = build(shape)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": sgd.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    watch = Stopwatch()
    manager = Manager(
        state_dict=state_dict,
        load_state_dict=load_state_dict,
        lighthouse_addr=flags.lighthouse,
        replica_id=flags.name,
    )
    Training(
        shape,
        DistributedDataParallel(manager, model),
        OptimizerWrapper(manager, sgd),
        current_step=manager.current_step,
        num_participants=manager.num_participants,
        close=manager.shutdown,
        lap=watch.lap,
    ).obey()


if __name__ == "__main__":
    main()
