"""Where the cache of a job lies, and who said so.

Four places may name it; the first that does wins: `[cache] dir` of the job (or `--cache-dir`),
`--cache_dir` inside NEURON_CC_FLAGS, NEURON_COMPILE_CACHE_URL, the user's cache directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from shardwright.compiler.diagnostics import UsageError
from shardwright.compiler.surface.resolve import Given
from shardwright.orchestrator.compile.compile_flags import ENVIRONMENT, of_environment
from shardwright.orchestrator.host import inside_ray_job

URL_VARIABLE = "NEURON_COMPILE_CACHE_URL"


@dataclass(frozen=True, slots=True)
class Location:
    """A directory of this host, and with `url` a store behind it that hosts share."""

    directory: Path
    reason: str
    url: str = ""

    def __str__(self) -> str:
        place = f"{self.url}, copied to {self.directory}" if self.url else str(self.directory)
        return f"{place} ({self.reason})"


def locate(
    configured: str = "",
    local: str = "",
    environ: Mapping[str, str] = os.environ,
    source: str = "cache.dir",
) -> Location:
    """The place that `configured` names, which was found in `source`, else the environment, else
    the user's cache directory; `local` is the directory for copies of a shared store. Raises
    UsageError for a URL that names no place we can use."""
    text, reason = (configured, source) if configured else _of_environment(environ)
    if not text:
        return Location(_default(environ), "default")
    url = urlsplit(text)
    match url.scheme:
        case "s3":
            copies = Path(os.path.expanduser(local)) if local else _default(environ)
            return Location(copies, reason, _bucket_url(text, reason))
        case "":
            return Location(_lasting(Path(os.path.expanduser(text)), reason), reason)
        case "file" if url.netloc in ("", "localhost"):
            return Location(_lasting(Path(unquote(url.path)), reason), reason)
    raise UsageError(
        "SW_CACHE_URL",
        f"{reason} requires a directory, file:///directory or s3://bucket/prefix,"
        f" got {_shown(text)}",
        hint="name a directory, or leave it empty for the user's cache directory",
    )


def named_by(flags: Sequence[Given]) -> str:
    """The place that `--cache_dir` names among flags, the right-most; empty without it."""
    places = [given.value for given in flags if given.flag.name == "cache_dir"]
    return places[-1] if places else ""


def _of_environment(environ: Mapping[str, str]) -> tuple[str, str]:
    """The text that names the place, and where it was found."""
    if place := named_by(of_environment(environ)):
        return place, f"--cache_dir of {ENVIRONMENT}"
    return environ.get(URL_VARIABLE, ""), URL_VARIABLE


def _lasting(path: Path, reason: str) -> Path:
    """Raises UsageError for a relative path inside a Ray job, which would be lost with it."""
    if inside_ray_job() and not path.is_absolute():
        raise UsageError(
            "SW_RELATIVE_OUTPUT",
            f"{reason} requires an absolute path or an s3:// URL inside a Ray job, got {path}",
            hint="name a folder that outlives the job",
        )
    return path


def _default(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "shardwright"


def _bucket_url(text: str, reason: str) -> str:
    """The URL without its last slash. Raises UsageError for one without a bucket, and for one with
    credentials, which would end up in reports."""
    url = urlsplit(text)
    if "@" in url.netloc:
        raise UsageError(
            "SW_CACHE_URL",
            f"{reason} requires an s3:// URL without credentials, got one with them",
            hint="give them as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or as a profile",
        )
    if not url.netloc or url.query or url.fragment:
        raise UsageError(
            "SW_CACHE_URL", f"{reason} requires s3://bucket/prefix, got {_shown(text)}"
        )
    return text.rstrip("/")


def _shown(text: str) -> str:
    """A URL without what may be a secret: credentials, and the query, where signatures are."""
    url = urlsplit(text)
    host = url.netloc.rpartition("@")[2]
    return urlunsplit((url.scheme, host, url.path, "..." if url.query else "", ""))
