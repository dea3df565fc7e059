"""A TorchX component that runs a job of several replica groups.

    torchx run -s slurm torchft_svc/torchx.py:hsdp --replicas 4 --script train.py -- --lr 0.1

It takes the arguments of the public torchft release's component. The lighthouse runs elsewhere.
"""

# No postponed annotations: TorchX reads those of the component as types.

from typing import Dict, Optional  # noqa: UP035

from torchx import specs

from torchft_svc import env as environment
from torchft_svc.errors import ConfigError
from torchft_svc.host.exit_verdict import DO_NOT_REQUEUE

# Where the public release's lighthouse and ours listen by default, as it is written there.
_LOCAL_LIGHTHOUSE = "http://localhost:29510"
_FIRST_PORT = 29600


def hsdp(
    *script_args: str,
    replicas: int = 2,
    workers_per_replica: int = 1,
    max_restarts: int = 0,
    script: str = "train_ddp.py",
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045 - TorchX reads the source
    image: str = "",
    h: Optional[str] = None,  # noqa: UP045
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,  # noqa: N803 - TorchX' name
) -> specs.AppDef:
    """Run replica groups, each as a role of its own: a launcher with the group's workers.

    Args:
        script_args: for the script, behind ``--``
        replicas: the number of replica groups
        workers_per_replica: workers of each
        max_restarts: how often a launcher starts its workers again
        script: the training program
        env: variables of the groups
        image: of the scheduler
        h: a named resource, instead of the next three
        cpu: processors of a group
        gpu: GPUs of a group
        memMB: memory of a group
    """
    for name, value in (("replicas", replicas), ("workers_per_replica", workers_per_replica)):
        if value < 1:
            raise ConfigError(name, value, "use 1 or more")
    lighthouse = environment.value_of("TORCHFT_LIGHTHOUSE", _LOCAL_LIGHTHOUSE)
    shared = {"TORCHFT_LIGHTHOUSE": lighthouse, environment.VERDICT_VARIABLE: str(DO_NOT_REQUEUE)}
    if gpu == 0 and h is None:
        shared |= {"CUDA_VISIBLE_DEVICES": "", "XPU_VISIBLE_DEVICES": ""}
    return specs.AppDef(
        name="torchft",
        roles=[
            specs.Role(
                name=f"replica_{number}",
                image=image,
                num_replicas=1,
                resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
                max_retries=0,
                env={
                    "REPLICA_GROUP_ID": str(number),
                    "NUM_REPLICA_GROUPS": str(replicas),
                    **shared,
                    **(env or {}),
                },
                entrypoint="torchft-run",
                args=[
                    f"--master_port={_FIRST_PORT + number}",
                    "--nnodes=1",
                    f"--nproc_per_node={workers_per_replica}",
                    f"--max_restarts={max_restarts}",
                    *([script] if script else []),
                    *script_args,
                ],
            )
            for number in range(replicas)
        ],
    )
