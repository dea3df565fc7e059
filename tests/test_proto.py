"""Tests the wire: generated code is fresh and loads, numbers and names are those of the design."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import google.protobuf
import grpc_tools
import pytest
from google.protobuf import timestamp_pb2
from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc

from torchft_svc.proto import torchft_pb2 as pb

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "torchft_svc" / "proto"
PAPER = ROOT / "tests" / "support" / "design_paper.proto"
# Names that differ from the paper's; numbers and types never do.
RENAMED = {
    "ManagerQuorumResponse": {
        "address": "recover_src_manager_address",
        "max_rank": "max_replica_rank",
    },
}
# What the public release has beside the paper's fields in the messages to a lighthouse.
PUBLIC = {
    "QuorumMember": {
        "shrink_only": (6, "BOOL"),
        "data": (7, "STRING"),
        "commit_failures": (8, "INT64"),
    },
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
        "About": ("LighthouseAboutRequest", "LighthouseAboutResponse", False, False),
        "HasRoom": ("LighthouseRoomRequest", "LighthouseRoomResponse", False, False),
        "JobMembers": ("JobMembersRequest", "JobMembersResponse", False, False),
        "ReportCopies": ("ReportCopiesRequest", "JobMembersResponse", False, False),
        "Incidents": ("LighthouseIncidentsRequest", "LighthouseIncidentsResponse", False, False),
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
        "JobMembers": ("JobMembersRequest", "JobMembersResponse", False, False),
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
    """Run `make proto` when this fails."""
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


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptor:
    """The messages and services of the design paper, compiled from its own text."""
    compiled = tmp_path_factory.mktemp("paper") / "paper.bin"
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = ["", f"-I{PAPER.parent}", f"-I{well_known}", f"--descriptor_set_out={compiled}"]
    assert protoc.main([*arguments, PAPER.name]) == 0
    (file,) = FileDescriptorSet.FromString(compiled.read_bytes()).file
    pool = DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    return pool.AddSerializedFile(file.SerializeToString()) or pool.FindFileByName(file.name)


def shape(field: FieldDescriptor) -> tuple[int, str, str, bool, bool]:
    """Number, type, type of message, whether it is repeated, and whether it may be absent."""
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_")
    message = field.message_type.name if field.message_type is not None else ""
    is_optional = not message and field.has_presence
    return field.number, kind, message, field.is_repeated, is_optional


def test_all_messages_of_the_paper_have_its_numbers_types_and_names(paper: FileDescriptor) -> None:
    assert len(paper.message_types_by_name) == 14
    for name, message in paper.message_types_by_name.items():
        renamed = RENAMED.get(name, {})
        theirs = {renamed.get(field.name, field.name): shape(field) for field in message.fields}
        shared = {
            field.name: shape(field)
            for field in pb.DESCRIPTOR.message_types_by_name[name].fields
            if field.number < FIRST_OWN_NUMBER and field.name not in PUBLIC.get(name, {})
        }
        assert shared == theirs, name


def test_fields_of_the_public_release_have_its_numbers() -> None:
    for name, fields in PUBLIC.items():
        message = pb.DESCRIPTOR.message_types_by_name[name]
        assert {each: shape(message.fields_by_name[each])[:2] for each in fields} == fields


def test_all_services_of_the_paper_have_its_calls(paper: FileDescriptor) -> None:
    assert len(paper.services_by_name) == 2
    for name, service in paper.services_by_name.items():
        for method in service.methods:
            types = (method.input_type.name, method.output_type.name, False, False)
            assert METHODS[name][method.name] == types


def test_an_answer_of_the_paper_is_read_by_its_own_names(paper: FileDescriptor) -> None:
    """An answer of ours is read by the paper's names, too: a name is not sent."""
    theirs = GetMessageClass(paper.message_types_by_name["ManagerQuorumResponse"])
    values = {"quorum_id": 7, "store_address": "b:2", "max_step": 5, "heal": True}
    answer = pb.ManagerQuorumResponse(
        **values, recover_src_manager_address="a:1", max_replica_rank=0, round=3
    )
    expected = theirs(**values, address="a:1", max_rank=0)
    read = theirs.FromString(answer.SerializeToString())
    read.DiscardUnknownFields()
    assert read == expected
    again = pb.ManagerQuorumResponse.FromString(expected.SerializeToString())
    answer.ClearField("round")
    assert again == answer


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
        reason = str(getattr(error, "stderr", None) or error)
        pytest.skip(f"pip cannot install {requirement}: {reason.strip()[-200:]}")
    return where
