"""Regenerates the code next to the .proto files: ``python protos/generate.py [OUT]``, with grpcio-tools as pinned."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).parent
PROTOS = ("paceline/v1/generation.proto",)


def generate(out: Path = ROOT) -> None:
    """Write the Python code of every .proto file below `out`.  RuntimeError if protoc refuses one of them."""
    for proto in PROTOS:
        arguments = [f"--proto_path={ROOT}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
        if protoc.main(["protoc", *arguments, proto]) != 0:
            raise RuntimeError(f"protoc failed on {proto}; what is wrong stands above")


if __name__ == "__main__":
    generate(*map(Path, sys.argv[1:]))
