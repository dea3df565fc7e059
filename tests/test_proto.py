"""Tests the wire: generated code is fresh and loads, numbers and names are those of the design."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import google.protobuf
import grpc_tools
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto

from torchft_svc.proto import torchft_pb2 as pb

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "torchft_svc" / "proto"
# What the public release has: field numbers must never change.
SHARED = {
    "QuorumMember": {
        "replica_id": (1, "STRING"),
        "address": (2, "STRING"),
        "store_address": (3, "STRING"),
        "step": (4, "INT64"),
        "world_size": (5, "UINT64"),
        "shrink_only": (6, "BOOL"),
        "data": (7, "STRING"),
        "commit_failures": (8, "INT64"),
    },
    "Quorum": {
        "quorum_id": (1, "INT64"),
        "participants": (2, "MESSAGE"),
        "created": (3, "MESSAGE"),
    },
    "LighthouseQuorumRequest": {"requester": (1, "MESSAGE")},
    "LighthouseQuorumResponse": {"quorum": (1, "MESSAGE")},
    "LighthouseHeartbeatRequest": {"replica_id": (1, "STRING")},
    "LighthouseHeartbeatResponse": {},
    "ManagerQuorumRequest": {
        "rank": (1, "INT64"),
        "step": (2, "INT64"),
        "checkpoint_server_addr": (3, "STRING"),
    },
    "ManagerQuorumResponse": {
        "quorum_id": (1, "INT64"),
        "recover_src_manager_address": (2, "STRING"),
        "store_address": (3, "STRING"),
        "max_step": (4, "INT64"),
        "max_replica_rank": (5, "INT64"),
        "max_world_size": (6, "INT64"),
        "replica_rank": (7, "INT64"),
        "replica_world_size": (8, "INT64"),
        "heal": (9, "BOOL"),
    },
    "CheckpointAddressRequest": {"rank": (1, "INT64")},
    "CheckpointAddressResponse": {"checkpoint_server_address": (1, "STRING")},
    "ShouldCommitRequest": {
        "should_commit": (1, "BOOL"),
        "rank": (2, "INT64"),
        "step": (3, "INT64"),
    },
    "ShouldCommitResponse": {"should_commit": (1, "BOOL")},
    "KillRequest": {"msg": (1, "STRING")},
    "KillResponse": {},
}
# (request, answer, request is a stream, answer is a stream)
METHODS = {
    "LighthouseService": {
        "Quorum": ("LighthouseQuorumRequest", "LighthouseQuorumResponse", False, False),
        "Heartbeat": ("LighthouseHeartbeatRequest", "LighthouseHeartbeatResponse", False, False),
        "Leave": ("LighthouseLeaveRequest", "LighthouseLeaveResponse", False, False),
        "Session": ("SessionRequest", "SessionNews", True, True),
        "Rendezvous": ("AgentRequest", "AgentNews", True, True),
        "Kill": ("LighthouseKillRequest", "LighthouseKillResponse", False, False),
        "Drain": ("LighthouseDrainRequest", "LighthouseDrainResponse", False, False),
        "Status": ("LighthouseStatusRequest", "LighthouseStatusResponse", False, False),
        "HasRoom": ("LighthouseRoomRequest", "LighthouseRoomResponse", False, False),
        "AcceptLoss": ("AcceptLossRequest", "AcceptLossResponse", False, False),
    },
    "ManagerService": {
        "Quorum": ("ManagerQuorumRequest", "ManagerQuorumResponse", False, False),
        "CheckpointAddress": (
            "CheckpointAddressRequest",
            "CheckpointAddressResponse",
            False,
            False,
        ),
        "ShouldCommit": ("ShouldCommitRequest", "ShouldCommitResponse", False, False),
        "Kill": ("KillRequest", "KillResponse", False, False),
        "Drain": ("DrainRequest", "DrainResponse", False, False),
        "Attach": ("AttachRequest", "AttachNews", True, True),
    },
}
FIRST_OWN_NUMBER = 16
ROUND_TRIP = """
import google.protobuf
from torchft_svc.proto import torchft_pb2 as pb
member = pb.QuorumMember(replica_id="a:1", step=2**62, seen_quorum_id=7)
again = pb.QuorumMember.FromString(member.SerializeToString())
assert again == member and again.step == 2**62
print(google.protobuf.__version__)
"""


@pytest.mark.parametrize(
    "name", ["torchft_pb2.py", "torchft_pb2.pyi", "etcd_pb2.py", "etcd_pb2.pyi"]
)
@pytest.mark.processes
def test_the_generated_code_is_fresh(name: str, tmp_path: Path) -> None:
    """When this falls: `make proto`."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-Iproto", f"-I{well_known}"),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "proto/torchft.proto"),
            "proto/etcd.proto",
        ],
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    assert (tmp_path / name).read_text() == (GENERATED / name).read_text()


@pytest.mark.parametrize("message", SHARED)
def test_shared_fields_have_the_numbers_of_the_public_release(message: str) -> None:
    fields = pb.DESCRIPTOR.message_types_by_name[message].fields
    shared = {
        field.name: (field.number, FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_"))
        for field in fields
        if field.number < FIRST_OWN_NUMBER
    }
    assert shared == SHARED[message]


def test_what_is_repeated_and_what_may_be_absent() -> None:
    def field(message: str, name: str) -> FieldDescriptor:
        found: FieldDescriptor = pb.DESCRIPTOR.message_types_by_name[message].fields_by_name[name]
        return found

    assert pb.Quorum(participants=[pb.QuorumMember()]).participants
    assert field("ManagerQuorumResponse", "max_replica_rank").has_presence
    assert field("ManagerQuorumRequest", "init_sync").has_presence
    assert not field("ManagerQuorumResponse", "max_world_size").has_presence
    assert field("Quorum", "created").message_type.full_name == "google.protobuf.Timestamp"


def test_the_package_the_services_and_their_methods() -> None:
    assert pb.DESCRIPTOR.package == "torchft"
    services = pb.DESCRIPTOR.services_by_name
    found = {
        name: {
            method.name: (
                method.input_type.name,
                method.output_type.name,
                method.client_streaming,
                method.server_streaming,
            )
            for method in service.methods
        }
        for name, service in services.items()
    }
    assert found == METHODS


def test_an_encoded_quorum_is_the_news_of_a_session_too() -> None:
    """So that a quorum is encoded once, and the same bytes go to every kind of caller."""
    answer = pb.LighthouseQuorumResponse(quorum=pb.Quorum(quorum_id=5))
    news = pb.SessionNews.FromString(answer.SerializeToString())
    assert news.WhichOneof("kind") == "quorum"
    assert news.quorum == answer.quorum


def test_news_of_a_loss_is_passed_on_as_it_came() -> None:
    lost = pb.SessionNews(lost=pb.MemberLost(replica_id="a:1", reason="gone"))
    passed = pb.AttachNews.FromString(lost.SerializeToString())
    assert passed.WhichOneof("kind") == "lost"
    assert passed.lost == lost.lost


@pytest.mark.parametrize("major", [6, 7])
@pytest.mark.processes
def test_the_generated_code_loads_with_protobuf(major: int, tmp_path: Path) -> None:
    path = [str(ROOT)]
    if not google.protobuf.__version__.startswith(f"{major}."):
        path.insert(0, str(_installed(f"protobuf>={major},<{major + 1}", tmp_path)))
    script = f"import sys; sys.path[:0] = {path!r}\n{ROUND_TRIP}"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{major}.")


def _installed(requirement: str, where: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    try:
        subprocess.run(
            [*pip, "--disable-pip-version-check", "--target", str(where), requirement],
            capture_output=True,
            text=True,
            timeout=60,  # without a network it tries for longer
            check=True,
        )
    except subprocess.SubprocessError as error:
        told = str(getattr(error, "stderr", None) or error)
        pytest.skip(f"pip cannot install {requirement}: {told.strip()[-200:]}")
    return where
