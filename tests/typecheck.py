"""Runs mypy over the packages under their import names: `python tests/typecheck.py`.

The packages are top-level folders that are mapped into `paceline` at installation, which mypy cannot follow; so it gets
to see them in a folder that is called that.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("actors", "cluster", "kernels", "protos")


def main() -> int:
    """mypy's exit status."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "paceline").mkdir()
        for package in PACKAGES:
            (base / "paceline" / package).symlink_to(ROOT / package)
        (base / "paceline" / "v1").symlink_to(ROOT / "protos" / "paceline" / "v1")
        options = ["--explicit-package-bases", "--namespace-packages", "--cache-dir", str(ROOT / ".mypy_cache")]
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            *options,
            "-p",
            "paceline",
        ]
        return subprocess.run(command, cwd=base, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
