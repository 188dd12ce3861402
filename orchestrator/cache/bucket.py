"""Objects of a bucket of S3, or of a service that speaks it: the four requests that we make.

Trouble of the service, or on the way to it, is a StoreError. Conditions make writers safe from each
other; a service that does not know them says so once (`is_conditional`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from shardwright.orchestrator.cache.entry import MAX_ENTRY_BYTES
from shardwright.orchestrator.cache.store import StoreError

_CONNECT_S, _READ_S, _ATTEMPTS = 3, 20, 3
"""Our choice: an outage is noticed within ten seconds, and a slow answer is none."""
_REFUSED = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_UNKNOWN = ("NotImplemented", "InvalidArgument", "InvalidRequest", "501")
_ABSENT = ("NoSuchKey", "NotFound", "404")


@contextlib.contextmanager
def _diagnosed() -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

    try:
        yield
    except (BotoCoreError, ClientError, HTTPClientError, OSError) as error:
        raise StoreError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Object:
    """What a GET brought: the bytes, the tag of this version, its age by the service's clock."""

    data: bytes
    tag: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of a listing."""

    key: str
    size: int
    modified_s: float


class _UnknownConditionError(Exception):
    """The service does not know conditional requests."""


class Bucket:
    """The objects under the prefix of an s3:// URL; keys are relative to it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._name = parts.netloc
        prefix = parts.path.strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self.is_conditional = True  # until the service refuses

    @cached_property
    def _client(self) -> Any:
        """Made when it is first needed: importing boto3 takes half a second."""
        import boto3
        from botocore.config import Config

        config = Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
            # Entries carry a checksum of ours, and older services know none of the newer ones.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return boto3.client("s3", config=config)

    @_diagnosed()
    def get(self, key: str) -> Object | None:
        """The object, None when there is none. Raises StoreError for one of absurd size."""
        answer = self._answer("get_object", _ABSENT, key)
        if answer is None:
            return None
        size = answer.get("ContentLength")
        if size is None or size > MAX_ENTRY_BYTES:
            raise StoreError(f"{key} has {size} bytes, at most {MAX_ENTRY_BYTES} are read")
        now = answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        written: datetime = answer["LastModified"]
        age = (parsedate_to_datetime(now) - written).total_seconds() if now else 0.0
        # Without a size, read() knows when the connection was cut; a short answer is no entry that
        # was damaged in the bucket.
        return Object(answer["Body"].read(), answer["ETag"], age)

    @_diagnosed()
    def put(self, key: str, data: bytes, replacing: str = "") -> str:
        """Put an object where there is none, or in place of the version with the tag `replacing`;
        the tag of the new one, empty when there is another version. Where the service knows no
        conditions, whatever was there a moment ago stays."""
        if self.is_conditional:
            condition = {"IfMatch": replacing} if replacing else {"IfNoneMatch": "*"}
            try:
                answer = self._answer("put_object", _REFUSED, key, Body=data, **condition)
                return str(answer["ETag"]) if answer else ""
            except _UnknownConditionError:
                self.is_conditional = False
        if self.get(key) is not None:
            return ""
        return str(self._answer("put_object", (), key, Body=data)["ETag"])

    @_diagnosed()
    def delete(self, key: str, tag: str = "") -> None:
        """Remove an object; with `tag` only that version of it, where the service can tell."""
        answers = (*_REFUSED, *_ABSENT)
        try:
            self._answer("delete_object", answers, key, **({"IfMatch": tag} if tag else {}))
        except _UnknownConditionError:  # some know conditions of puts alone
            self._answer("delete_object", answers, key)

    def list(self) -> Iterator[Listed]:
        """All objects."""
        with _diagnosed():
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._name, Prefix=self._prefix):
                for row in page.get("Contents", ()):
                    key = row["Key"].removeprefix(self._prefix)
                    yield Listed(key, row["Size"], row["LastModified"].timestamp())

    def _answer(self, request: str, answers: tuple[str, ...], key: str, **given: Any) -> Any:
        """What the service says; None for the refusals that are `answers`."""
        from botocore.exceptions import ClientError

        try:
            return getattr(self._client, request)(
                Bucket=self._name, Key=self._prefix + key, **given
            )
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in answers:
                return None
            if code in _UNKNOWN and ("IfNoneMatch" in given or "IfMatch" in given):
                raise _UnknownConditionError from error
            raise
