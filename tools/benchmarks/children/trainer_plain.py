"""A worker of plain torch DDP over gloo: what a step costs without fault tolerance."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tools.benchmarks.children.workload import Training, build, shape_from_flags


def main() -> None:
    shape, flags = shape_from_flags()
    store = dist.TCPStore("127.0.0.1", flags.store_port, 2, is_master=flags.rank == 0)
    dist.init_process_group("gloo", store=store, rank=flags.rank, world_size=2)
    model, sgd = build(shape)
    ddp = DistributedDataParallel(model)
    Training(shape, ddp, sgd, close=dist.destroy_process_group).obey()


if __name__ == "__main__":
    main()
