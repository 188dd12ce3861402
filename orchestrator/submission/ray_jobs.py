"""Jobs of a Ray cluster, through its job API: submit, look, follow, stop.

What goes wrong on the way to the cluster becomes an error that says what to do. The token, if the
cluster has one, is read by Ray from RAY_AUTH_TOKEN_PATH (or RAY_AUTH_TOKEN) and only ever sent to
the cluster's address.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from shardwright.compiler.diagnostics import DiagnosticError, ExecutionError, UsageError

ADDRESS = "RAY_API_SERVER_ADDRESS"
_POLL_S = 0.2
_RECONNECT_S = 1.0
_CLOSING_TRIES = 15
"""Our choice: three seconds; a job that has ended is told so within one."""
_OUTAGE_S, _OUTAGE_TRIES = 5.0, 36
"""Our choice: a network that is away for three minutes, or a head that is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A command for a cluster: what is uploaded with it, and the variables it gets."""

    command: str
    working_dir: Path
    packages: tuple[Path, ...] = ()
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What the cluster says of a job; `exit_code` is that of its command, None before it ended by
    itself. Times are Unix times."""

    id: str
    status: str
    ended: bool
    exit_code: int | None
    message: str
    command: str
    started_s: float | None
    ended_s: float | None

    @property
    def result(self) -> int:
        """The exit code of the job; of one that was stopped, that of an interrupt. Raises
        ExecutionError for a job whose command never ran, or was lost with its node."""
        if self.exit_code is not None:
            return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code
        if self.status == "STOPPED":
            return 130
        raise ExecutionError(
            "SW_RAY_JOB",
            f"job {self.id} ended as {self.status} without an exit code: {self.message}",
            hint="the cluster could not run it; the dashboard's page of the job says more",
        )


@dataclass(slots=True)
class _Log:
    """A log on its way to `write`, whole and once, however often it is read from its start, where
    `read` is 0. Both counts are characters."""

    write: Callable[[str], object]
    written: int = 0
    read: int = 0

    def take(self, text: str) -> None:
        """The next part."""
        fresh = text[max(0, self.written - self.read) :]
        self.read += len(text)
        if fresh:
            self.write(fresh)
            self.written = self.read


class RayJobs:
    """The jobs of the cluster whose dashboard is at `address`, or at RAY_API_SERVER_ADDRESS. Raises
    UsageError without an address, for one that does not answer, and for a missing or wrong
    token."""

    def __init__(self, address: str = "") -> None:
        self.address = _url(address or os.environ.get(ADDRESS, ""))
        if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
            # Ray reads neither unless this is set.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        with self._errors():
            from ray.job_submission import JobSubmissionClient

            self._client: Any = JobSubmissionClient(self.address)

    def submit(self, submission: Submission) -> str:
        """Upload and start a job; its id. What was uploaded before is not uploaded again."""
        runtime_env: dict[str, Any] = {
            "working_dir": str(submission.working_dir),
            "env_vars": dict(submission.environment),
        }
        if submission.packages:
            runtime_env["py_modules"] = [str(path) for path in submission.packages]
        with self._errors():
            job: str = self._client.submit_job(
                entrypoint=submission.command, runtime_env=runtime_env
            )
            return job

    def state(self, job: str) -> JobState:
        """What became of a job. Raises UsageError when the cluster does not know it."""
        with self._errors(job):
            return _state(self._client.get_job_info(job))

    def states(self) -> list[JobState]:
        """All jobs that were submitted, the latest last."""
        with self._errors():
            rows = self._client.list_jobs()
        states = [_state(row) for row in rows if row.submission_id]
        return sorted(states, key=lambda state: state.started_s or 0.0)

    def follow(self, job: str, write: Callable[[str], object]) -> JobState:
        """Give `write` the job's log as it grows, until the job has ended. A connection that
        breaks, or that a head closes on its way down, is made again; what was written is not
        written twice. Raises UsageError when the cluster has not answered for some minutes,
        ExecutionError when it has forgotten the job."""
        log = _Log(write)
        try:
            while True:
                is_whole = self._tailed(job, log)
                # A job ends a little after its log, unless it was the head that ended.
                state = self._ended(job, range(_CLOSING_TRIES if is_whole else 1))
                if state.ended:
                    if not is_whole:
                        self._tailed(job, log)
                    return state
                time.sleep(_RECONNECT_S)
        except UsageError as error:
            if error.code != "SW_RAY_JOB" or not log.written:
                raise
            raise ExecutionError(
                "SW_RAY_JOB",
                f"the cluster at {self.address} has forgotten job {job}, which it was running: its"
                " head was started anew",
                hint="submit it again: finished units are in the cache",
            ) from error

    def _state_again(self, job: str) -> JobState:
        """As `state`, through an outage: the job does not end with our way to it."""
        for _ in range(_OUTAGE_TRIES):
            try:
                return self.state(job)
            except UsageError as error:
                if error.code != "SW_RAY_ADDRESS":
                    raise
            time.sleep(_OUTAGE_S)
        return self.state(job)

    def stop(self, job: str) -> JobState:
        """End a job and wait for it: Ray sends SIGTERM, and SIGKILL three seconds later."""
        with self._errors(job):
            self._client.stop_job(job)
        return self._ended(job, count())

    def _ended(self, job: str, tries: Iterable[int]) -> JobState:
        """The state of a job once it has ended, or after so many tries."""
        for number in tries:
            if number:
                time.sleep(_POLL_S)
            if (state := self._state_again(job)).ended:
                break
        return state

    def _tailed(self, job: str, log: _Log) -> bool:
        """Whether the log was written to its end; False when the connection broke."""
        from aiohttp import ClientError

        async def tail() -> None:
            log.read = 0
            async for text in self._client.tail_job_logs(job):
                log.take(text)

        with self._errors(job):
            try:
                asyncio.run(tail())
            except (RuntimeError, OSError, ClientError):
                return False
        return True

    @contextmanager
    def _errors(self, job: str = "") -> Iterator[None]:
        """Errors of Ray's client as ours, and its log lines left out."""
        from ray.exceptions import AuthenticationError
        from requests.exceptions import RequestException

        before = logging.root.manager.disable
        logging.disable(logging.INFO)
        try:
            yield
        except DiagnosticError:
            raise
        except ConnectionError as error:
            raise self._away() from error
        except AuthenticationError as error:
            raise UsageError(
                "SW_RAY_TOKEN",
                f"the cluster at {self.address} requires a token, got none or another one",
                hint="set RAY_AUTH_TOKEN_PATH to a file with the cluster's (docs/submission.md)",
            ) from error
        except (RequestException, RuntimeError, ValueError) as error:
            # An address that is none is a ValueError too; all else on the way is the way's.
            is_away = isinstance(error, RequestException) and not isinstance(error, ValueError)
            raise (self._away() if is_away else self._refusal(error, job)) from error
        finally:
            logging.disable(before)

    def _away(self) -> UsageError:
        return UsageError(
            "SW_RAY_ADDRESS",
            f"no Ray dashboard answers at {self.address}",
            hint="--address is that of the dashboard, http://head:8265; is a tunnel open?",
        )

    def _refusal(self, error: Exception, job: str) -> UsageError:
        text = str(error).strip()
        # A proxy without its head, or, asked about a job, a head that is still starting.
        if re.search(r"status code (5\d\d)" if job else r"status code (50[234])", text):
            return self._away()
        if job and "status code 404" in text:
            return UsageError(
                "SW_RAY_JOB",
                f"the cluster at {self.address} requires the id of one of its jobs, got {job}",
                hint="`shardwright status` lists them",
            )
        lines = text.splitlines() or [""]
        shown = " ... ".join(dict.fromkeys((lines[0], lines[-1])))
        hint = "list what the job does not need in .rayignore" if "exceeds the max" in text else ""
        return UsageError(
            "SW_RAY_JOB", f"the cluster at {self.address} refused: {shown}", hint=hint
        )


def _url(address: str) -> str:
    if not address:
        raise UsageError(
            "SW_RAY_ADDRESS",
            f"--address requires the URL of a Ray dashboard, got none, and {ADDRESS} is not set",
            hint="for example --address http://head:8265",
        )
    return address if "://" in address else f"http://{address}"


def _state(info: Any) -> JobState:
    return JobState(
        id=info.submission_id,
        status=info.status.value,
        ended=info.status.is_terminal(),
        exit_code=info.driver_exit_code,
        message=(info.message or "").partition("\n")[0],
        command=info.entrypoint,
        started_s=None if info.start_time is None else info.start_time / 1000,
        ended_s=None if info.end_time is None else info.end_time / 1000,
    )
