"""Variables of a submitted job that would be secrets for everybody to see.

Ray keeps a job's variables with the job, and gives them as they are to every client of the cluster
(it hides them from browsers alone). So what looks like a secret is not sent: by its name, or as a
URL with a password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from shardwright.compiler.diagnostics import UsageError

_NAME = re.compile(
    r"SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|(PRIVATE|ACCESS|API)_?KEY"
    r"|TOKEN$|(^|_)(KEY|PAT|PASS)$|_PWD$",
    re.IGNORECASE,
)
_PLACE = re.compile(r"_(PATH|FILE|DIR)$", re.IGNORECASE)  # of a secret, not the secret


def check_environment(variables: Mapping[str, str]) -> None:
    """Refuse secrets among the variables of a job; values are never shown. Raises UsageError."""
    for name, value in variables.items():
        is_secret = bool(_NAME.search(name)) and not _PLACE.search(name)
        if is_secret or _has_password(value):
            what = name if is_secret else f"{name}, a URL with a password"
            raise UsageError(
                "SW_SECRET",
                f"--env requires variables that everybody who sees the cluster may see, got {what}",
                hint="set it on the cluster's nodes, give them a role, or name a file on them:"
                f" {name}_FILE=/path",
            )


def _has_password(value: str) -> bool:
    try:
        return bool(urlsplit(value).password)
    except ValueError:
        return False
