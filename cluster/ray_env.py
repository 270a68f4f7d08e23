"""Settings that Ray reads from the environment while it is imported: import this module before `ray`."""

from __future__ import annotations

import os
import secrets

if "RAY_AUTH_MODE" not in os.environ:
    # Ray's ports are open to everybody on the machine.  A token that only this process and its children know keeps
    # others out, and nothing is written to the home directory.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
