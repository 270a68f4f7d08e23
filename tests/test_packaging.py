"""`pip install .` installs every package under its import name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHECK = """
import sys
sys.path.insert(0, sys.argv[1])
import paceline.actors.tree, paceline.cluster.config, paceline.kernels, paceline.protos, paceline.v1.generation_pb2
for name, module in sorted(sys.modules.items()):
    if name.startswith("paceline."):
        assert module.__file__.startswith(sys.argv[1]), (name, module.__file__)
"""


@pytest.mark.slow
def test_an_ordinary_install_has_all_packages(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*pip, str(ROOT)], check=True, timeout=300)
    subprocess.run([sys.executable, "-c", CHECK, str(tmp_path / "site")], cwd=tmp_path, check=True, timeout=60)
    for wanted in ("paceline/v1/generation.proto", "paceline/actors/py.typed"):
        assert (tmp_path / "site" / wanted).is_file()
