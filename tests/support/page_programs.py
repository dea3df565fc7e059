"""The Python blocks of the pages as programs: which belong together, and what surrounds them.

A block is known by its first characters. What a page leaves out (a model, data) is written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support.documents import Block, code_blocks
from support.running import ROOT


@dataclass(frozen=True)
class PageProgram:
    """Blocks of a page, in the order in which the program has them.

    ``before``: what stands before them. ``between``: what stands before one of them. ``after``:
    what shows that they did what the page says. ``changes``: what is replaced in the blocks.
    ``is_launched``: torchft-run starts it. Each program prints ``done`` at its end.
    """

    page: str
    blocks: tuple[str, ...]
    before: str = ""
    between: Mapping[str, str] = field(default_factory=dict)
    after: str = ""
    changes: Mapping[str, str] = field(default_factory=dict)
    is_launched: bool = False

    def text(self) -> str:
        found = code_blocks(ROOT / self.page)
        parts = [self.before]
        for begin in self.blocks:
            (text,) = (block.text for block in found if block.text.startswith(begin))
            for old, new in self.changes.items():
                text = text.replace(old, new)
            parts += [self.between.get(begin, ""), text]
        return "\n".join([*parts, self.after, 'print("done", flush=True)\n'])


def program_of(page: Path, block: Block) -> str | None:
    """The name of a block in `PROGRAMS`, if it is in one."""
    name = page.relative_to(ROOT).as_posix()
    for program in PROGRAMS.values():
        for begin in program.blocks:
            if program.page == name and block.text.startswith(begin):
                return begin
    return None


_TORCH = """\
import torch
from torch import nn
from torchft_svc import Manager
from torchft_svc.client.algorithms import """

_MODEL = """\
import copy

import torch
from torch import nn

from torchft_svc import DistributedDataParallel, Manager, Optimizer

torch.manual_seed(0)
model = nn.Linear(4, 2)
features, targets = torch.randn(8, 4), torch.randint(2, (8,))


def loss_of(outputs):
    return nn.functional.cross_entropy(outputs, targets)

"""
_MANAGER = "manager = Manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)\n"
_DONE = "assert manager.current_step() == 1\nmanager.shutdown()\n"

_DATA = """\
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from torchft_svc import (
    DistributedDataParallel,
    ElasticDataLoader,
    ElasticSampler,
    Manager,
    Optimizer,
)

dataset = TensorDataset(torch.randn(300, 4), torch.randint(2, (300,)))
loader = DataLoader(dataset, sampler=ElasticSampler(dataset))
net = nn.Linear(4, 2)
manager = Manager(state_dict=net.state_dict, load_state_dict=net.load_state_dict)
optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.1))
model = DistributedDataParallel(manager, net)
"""
_ONE_EPOCH = {"epochs(10)": "epochs(1)"}
_THREE_STEPS = "assert manager.current_step() == 3\nmanager.shutdown()\n"

PROGRAMS = {
    "data": PageProgram(
        page="docs/data.md",
        blocks=("from torchft_svc import ElasticDataLoader, ElasticSampler",),
        before=_DATA,
        changes=_ONE_EPOCH,
        after=_THREE_STEPS,
    ),
    "microbatches": PageProgram(
        page="docs/data.md",
        blocks=("loader = ElasticDataLoader(manager, loader, global_batch_size=128, micro",),
        before=_DATA,
        changes=_ONE_EPOCH,
        after=_THREE_STEPS,
    ),
    "position in the data": PageProgram(
        page="docs/data.md",
        blocks=('saved = {"model": ..., "manager"',),
        before=_DATA + "loader = ElasticDataLoader(manager, loader, global_batch_size=128)\n",
        after="assert loader.state_dict() == saved['data']\nmanager.shutdown()\n",
    ),
    "local sgd": PageProgram(page="docs/slow-links.md", blocks=(f"{_TORCH}LocalSGD",)),
    "diloco": PageProgram(page="docs/slow-links.md", blocks=(f"{_TORCH}DiLoCo",)),
    "decoupled diloco": PageProgram(
        page="docs/slow-links.md", blocks=(f"{_TORCH}DecoupledDiLoCo",)
    ),
    "parameter server": PageProgram(
        page="docs/slow-links.md",
        blocks=("from datetime import timedelta\nimport torch", "weights = torch.empty(4)"),
        after="assert torch.equal(weights, Weights.values)\nserver.shutdown()\n",
    ),
    "metrics in the program's registry": PageProgram(
        page="docs/observability.md",
        blocks=("from prometheus_client import REGISTRY",),
        before=_MODEL,
        changes={
            "Manager(...,": "Manager(None, model.load_state_dict, model.state_dict,",
        },
        after="""\
from prometheus_client import generate_latest

manager.start_quorum()
assert manager.should_commit()
assert b"torchft_" in generate_latest(REGISTRY)
manager.shutdown()
""",
    ),
    "a log of votes": PageProgram(
        page="docs/observability.md",
        blocks=("import logging\n",),
        before=_MODEL,
        after=_MANAGER
        + """\
manager.start_quorum()
assert manager.should_commit()
with open("commits.log") as log:
    assert log.read().endswith("step 0: True\\n")
manager.shutdown()
""",
    ),
    "streams": PageProgram(
        page="docs/data.md",
        blocks=("loader = ElasticStream(manager, stream",),
        before=_DATA
        + """\
from torchft_svc import ElasticStream

stream = [(torch.randn(4), 1)] * 300
""",
        after="""\
for epoch in loader.epochs(1):
    for inputs, targets in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
"""
        + _THREE_STEPS,
    ),
    "several optimizers": PageProgram(
        page="docs/training-loops.md",
        blocks=("with manager.commit() as committed:",),
        before=_MODEL
        + _MANAGER
        + """\
parallel = DistributedDataParallel(manager, model)
adam, muon = torch.optim.Adam([model.weight]), torch.optim.SGD([model.bias], lr=0.1)
before = model.bias.detach().clone()
manager.start_quorum()
loss_of(parallel(features)).backward()
""",
        after=_DONE + "assert not torch.equal(before, model.bias)\n",
    ),
    "time for a drain": PageProgram(
        page="docs/operations.md",
        blocks=("until = manager.draining_until()",),
        before=_MODEL
        + """\
import os
import signal
import time

saves = []


def save_checkpoint():
    saves.append(time.monotonic())


os.environ["TORCHFT_GRACE_SEC"] = "60"
"""
        + _MANAGER
        + """\
os.kill(os.getpid(), signal.SIGTERM)
end = time.monotonic() + 30
while manager.draining_until() is None and time.monotonic() < end:
    time.sleep(0.01)
""",
        after="assert len(saves) == 1\nmanager.shutdown()\n",
    ),
    "closure": PageProgram(
        page="docs/training-loops.md",
        blocks=("optimizer = Optimizer(manager, lbfgs)",),
        before=_MODEL
        + _MANAGER
        + """\
batch = features
parallel = DistributedDataParallel(manager, model)
lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=1)
before = model.weight.detach().clone()
""",
        after=_DONE + "assert not torch.equal(before, model.weight)\n",
    ),
    "consistent state": PageProgram(
        page="docs/training-loops.md",
        blocks=("with manager.consistent_state():",),
        before=_MODEL
        + _MANAGER
        + """\
parallel = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
optimizer.zero_grad()
loss_of(parallel(features)).backward()
optimizer.step()
""",
        after=_DONE + "assert torch.equal(saved[0]['weight'], model.weight)\n",
    ),
    "sharded": PageProgram(
        page="docs/worker-groups.md",
        blocks=("fully_shard(model, mesh=mesh)",),
        before=_MODEL.replace("Optimizer\n", "Optimizer, replicate_across_groups\n")
        + """\
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchft_svc import sharded_state_dict

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
adam = torch.optim.Adam(model.parameters())


def load_state_dict(state):
    raise AssertionError("there is nobody to heal from")


""",
        after="""\
optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
optimizer.zero_grad()
loss_of(model(features)).backward()
optimizer.step()
"""
        + _DONE,
    ),
    "trainer": PageProgram(
        page="docs/trainer.md",
        blocks=(
            "import torch\nfrom torch import nn",
            "def train(context):",
            'trainer = Trainer(..., checkpoint_dir="checkpoints", resume="auto")',
            "import torch.distributed.checkpoint as dcp",
        ),
        changes={
            "range(10)": "range(2)",
            ".epoch, 10)": ".epoch, 2)",
            "epoch < 10": "epoch < 2",
            "randn(4096": "randn(256",
            "Trainer(...,": "Trainer(**creators,",
            "checkpoints/000004-step-384": "newest",
            '"newest"': "newest",
        },
        between={
            'trainer = Trainer(..., checkpoint_dir="checkpoints", resume="auto")': """\
assert trainer.position.epoch == 2
creators = dict(
    model_creator=lambda config: nn.Linear(32, 10),
    data_creator=make_data,
    optimizer_creator=lambda model, config: torch.optim.Adam(model.parameters()),
    loss_creator=nn.CrossEntropyLoss,
    config={"batch_size": 32},
)
""",
            "import torch.distributed.checkpoint as dcp": """\
assert trainer.position.epoch == 2
from pathlib import Path

trainer.save("newest")
expected = trainer.get_model().state_dict()
trainer.shutdown()
newest = "newest"
model = nn.Linear(32, 10)
""",
        },
        after="for name, value in state['model'].items():\n"
        "    assert torch.equal(expected[name], value)\n",
    ),
    "soft restarts": PageProgram(
        page="docs/elastic.md",
        blocks=(
            "training = Training()",
            "on_worker_event(note)",
        ),
        is_launched=True,
        before="""\
import torch
import torch.distributed as dist

from torchft_svc import ProcessGroupGloo
from torchft_svc.elastic import get_worker_info, on_worker_event

STEPS = 3


class Training:
    step = 0


def agree(training):
    step = torch.tensor([training.step])
    dist.all_reduce(step, dist.ReduceOp.MAX)
    training.step = int(step)


def train_step(training):
    training.step += 1


def note(event):
    pass


""",
        between={
            "on_worker_event(note)": """\
assert training.step == STEPS
pg, info = ProcessGroupGloo(), worker_info
""",
        },
        after="""\
ones = torch.ones(2)
pg.allreduce([ones]).wait()
assert ones.tolist() == [info.world_size] * 2
pg.shutdown()
""",
    ),
    "replica groups": PageProgram(
        page="docs/elastic.md",
        blocks=("text = read_text()",),
        is_launched=True,
        changes={"state_dict=..., load_state_dict=...": "state_dict=dict, load_state_dict=print"},
        before="""\
import torch.distributed as dist
from torch import nn

from torchft_svc import Manager
from torchft_svc.elastic import get_worker_info, leave_world

attempts = []
read_text, Transformer = str, lambda: nn.Linear(2, 2)


def shard(model):
    return model


def train(manager, model):
    attempts.append(dist.get_world_size())
    assert len(attempts) > 0
    manager.start_quorum()
    assert manager.should_commit()


""",
        after="assert attempts == [1]\nleave_world()\n",
    ),
}
