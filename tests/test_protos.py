"""The API's definition: the committed code is what it generates, and it explains every name in it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc
from paceline.protos.generate import PROTOS, ROOT, generate

GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def test_the_committed_code_is_what_the_protos_generate(tmp_path: Path):
    assert importlib.metadata.version("grpcio-tools") == "1.76.0", "install the extra `dev`"
    generate(tmp_path)
    fresh = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert set(fresh) == {Path(proto.removesuffix(".proto") + end) for proto in PROTOS for end in GENERATED}
    stale = [path for path, code in fresh.items() if (ROOT / path).read_bytes() != code]
    assert not stale, "run `python protos/generate.py` and commit what it changes"


def test_every_proto_is_generated():
    assert {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.proto")} == set(PROTOS)


@pytest.fixture(scope="module", params=PROTOS)
def file(request, tmp_path_factory) -> descriptor_pb2.FileDescriptorProto:
    out = tmp_path_factory.mktemp("descriptors") / "all.bin"
    arguments = [f"--proto_path={ROOT}", f"--descriptor_set_out={out}", "--include_source_info", request.param]
    assert protoc.main(["protoc", *arguments]) == 0
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    return file


def named(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """Where each thing that needs a comment stands, as source_code_info counts, and its name."""
    kinds = {4: (file.message_type, {2: "field", 8: "oneof_decl"}), 5: (file.enum_type, {2: "value"})}
    kinds[6] = (file.service, {2: "method"})
    for number, (things, parts) in kinds.items():
        for index, thing in enumerate(things):
            yield (number, index), thing.name
            for part, attribute in parts.items():
                for inner, member in enumerate(getattr(thing, attribute)):
                    if not member.name.startswith("_"):  # protoc's own, one for each optional field
                        yield (number, index, part, inner), f"{thing.name}.{member.name}"


def test_every_name_has_a_comment(file: descriptor_pb2.FileDescriptorProto):
    comments = {tuple(location.path): location.leading_comments.strip() for location in file.source_code_info.location}
    names = dict(named(file))
    assert len(names) > 50
    assert [name for path, name in names.items() if not comments.get(path)] == []


def test_sampling_can_tell_zero_from_unset(file: descriptor_pb2.FileDescriptorProto):
    for message in file.message_type:
        if message.name in ("SamplingOptions", "SpeculationOptions"):
            single = [field for field in message.field if field.label != field.LABEL_REPEATED]
            assert [field.name for field in single if not field.proto3_optional] == []
