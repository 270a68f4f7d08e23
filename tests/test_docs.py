"""The documents say what is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED = re.compile(r".*_pb2(_grpc)?\.py")


def test_the_architecture_has_a_line_for_every_module_and_no_other() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    listed = re.findall(r"^\| `([\w/]+\.(?:py|proto))` \|", text, flags=re.MULTILINE)
    files = [path for folder in ("actors", "cluster", "kernels", "protos") for path in (ROOT / folder).rglob("*.p*")]
    modules = {
        str(path.relative_to(ROOT))
        for path in files
        if path.suffix in (".py", ".proto") and path.name != "__init__.py" and not GENERATED.fullmatch(path.name)
    }
    assert sorted(listed) == sorted(modules)


def test_every_top_level_package_is_installed() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    for folder in ("actors", "cluster", "kernels", "protos"):
        assert f"paceline.{folder}" in packages


def test_ray_is_imported_by_the_shells_only() -> None:
    pattern = re.compile(r"^\s*(import ray\b|from ray\b)", flags=re.MULTILINE)
    users = {
        str(path.relative_to(ROOT))
        for folder in ("actors", "cluster", "kernels", "protos")
        for path in (ROOT / folder).rglob("*.py")
        if pattern.search(path.read_text())
    }
    assert users == {"actors/ray_actors.py", "cluster/cell.py", "cluster/link_bench.py"}
