"""The Python model that Triton loads: requests in, one response for each out, none kept waiting.

Its protocol is that of Triton's Python backend: `auto_complete_config`, `initialize`, `execute`,
`finalize`, and of a request `inputs`, `requested_output_names`, `is_cancelled` (since 23.10).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shardwright.compiler.diagnostics import DiagnosticError, UsageError, did_you_mean
from shardwright.orchestrator.triton.interface import Limits, TensorSpec
from shardwright.orchestrator.triton.simulator import Simulator, cancelled
from shardwright.orchestrator.triton.tensors import array_of, tensor_of

_STATUS = {
    "SW_TRITON_INPUT": "INVALID_ARG",
    "SW_TRITON_CANCELLED": "CANCELLED",
    "SW_TRITON_TIMEOUT": "UNAVAILABLE",
    "SW_TRITON_ENDED": "UNAVAILABLE",
    "SW_TRITON_CHANGED": "UNAVAILABLE",
}
"""Code -> status of a TritonError; others are INTERNAL."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """A request that is in order; `rows` are its samples, 0 without a batch."""

    place: int
    request: Any
    arrays: Mapping[str, np.ndarray]
    rows: int


class ServedModel:
    """A version folder as a Triton model. `model.py` of the folder derives `TritonPythonModel` from
    it, with the folder and Triton's module `triton_python_backend_utils`."""

    folder: ClassVar[Path]
    utils: ClassVar[Any]

    @classmethod
    def auto_complete_config(cls, config: Any) -> Any:
        """Triton: the configuration with all that the file says. Raises TritonModelException where
        it cannot be loaded or says something else."""
        said = config.as_dict()
        try:
            simulator = Simulator(cls.folder, Limits.of(said))
            try:
                interface = simulator.interface()
            finally:
                simulator.end()
            most = int(said.get("max_batch_size", 0))
            interface.check_batch(most)
            for spec in interface.inputs:
                config.add_input(spec.row(bool(most)))
            for spec in interface.outputs:
                config.add_output(spec.row(bool(most)))
            interface.check(config.as_dict())
        except (DiagnosticError, ValueError) as error:
            raise cls.utils.TritonModelException(_line(error)) from error
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton: load the file. Raises TritonModelException."""
        config = json.loads(args["model_config"])
        try:
            self._simulator = Simulator(self.folder, Limits.of(config))
            self._interface = self._simulator.interface()
            self._interface.check(config)
        except DiagnosticError as error:
            self.finalize()
            raise self.utils.TritonModelException(_line(error)) from error
        self._most = int(config.get("max_batch_size", 0))

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Triton: a response, or an error, for each request in order."""
        answers: dict[int, Any] = {}
        taken: list[_Taken] = []
        for place, request in enumerate(requests):
            try:
                taken.append(self._take(place, request))
            except DiagnosticError as error:
                answers[place] = self._refusal(error)
        for run in self._runs(taken):
            answers |= self._answers(run)
        return [answers[place] for place in range(len(requests))]

    def finalize(self) -> None:
        """Triton: the model is unloaded."""
        if hasattr(self, "_simulator"):
            self._simulator.end()

    def _take(self, place: int, request: Any) -> _Taken:
        """A request, checked. Raises UsageError for one that the file cannot take."""
        given = {tensor.name(): tensor for tensor in request.inputs()}
        specs = {spec.name: spec for spec in self._interface.inputs}
        for name in (*given, *specs):
            if (name in given) != (name in specs):
                got = f"{', '.join(given) or 'none'}"
                raise _refused(f"inputs {', '.join(specs)}", got, did_you_mean(name, specs))
        outputs = [spec.name for spec in self._interface.outputs]
        for name in request.requested_output_names():
            if name not in outputs:
                raise _refused(
                    f"outputs of {', '.join(outputs)}", name, did_you_mean(name, outputs)
                )
        arrays = {name: self._array(spec, given[name]) for name, spec in specs.items()}
        rows = {array.shape[0] for array in arrays.values()} if self._most else {0}
        if len(rows) > 1:
            raise _refused("as many samples in every input", " and ".join(map(str, sorted(rows))))
        return _Taken(place, request, arrays, rows.pop())

    def _array(self, spec: TensorSpec, tensor: Any) -> np.ndarray:
        row = spec.row(bool(self._most))
        try:
            array = array_of(tensor, spec.dtype)
        except TypeError as error:
            raise _refused(f"{spec.name} of {row['data_type']}", str(error)) from error
        fits = array.shape == spec.shape
        if self._most:
            rows = array.shape[0] if array.shape else 0
            fits = array.shape[1:] == spec.shape[1:] and 0 < rows <= self._most
        if not fits:
            most = f"at most {self._most} of " if self._most else ""
            shape = list(spec.shape[bool(self._most) :])
            raise _refused(f"{spec.name} of shape {most}{shape}", str(list(array.shape)))
        return array

    def _runs(self, taken: Sequence[_Taken]) -> Iterator[list[_Taken]]:
        """Requests that are one run: each alone, or as many as have no more samples than a run."""
        run: list[_Taken] = []
        for each in taken:
            if run and (not self._most or sum(t.rows for t in run) + each.rows > self._most):
                yield run
                run = []
            run.append(each)
        if run:
            yield run

    def _answers(self, run: Sequence[_Taken]) -> dict[int, Any]:
        """Place -> response of the requests of one run."""
        wanted = [each for each in run if not each.request.is_cancelled()]
        answers = {t.place: self._refusal(cancelled()) for t in run if t not in wanted}
        if not wanted:
            return answers
        try:
            results = self._simulator.run(
                self._joined(wanted),
                lambda: not all(each.request.is_cancelled() for each in wanted),
            )
        except DiagnosticError as error:
            return answers | {each.place: self._refusal(error) for each in wanted}
        first = 0
        for each in wanted:
            is_late = each.request.is_cancelled()
            answers[each.place] = (
                self._refusal(cancelled()) if is_late else self._response(each, results, first)
            )
            first += each.rows
        return answers

    def _joined(self, wanted: Sequence[_Taken]) -> dict[str, np.ndarray]:
        """The arrays of a run: those of its request, or rows of all of them and zeros."""
        if not self._most:
            return dict(wanted[0].arrays)
        joined = {}
        for spec in self._interface.inputs:
            joined[spec.name] = np.zeros(spec.shape, spec.numpy)
            rows = np.concatenate([each.arrays[spec.name] for each in wanted])
            joined[spec.name][: len(rows)] = rows
        return joined

    def _response(self, taken: _Taken, results: Mapping[str, np.ndarray], first: int) -> Any:
        named = taken.request.requested_output_names()
        tensors = []
        for spec in self._interface.outputs:
            if not named or spec.name in named:
                array = results[spec.name]
                own = array[first : first + taken.rows] if self._most else array
                tensors.append(tensor_of(self.utils, spec.name, own))
        return self.utils.InferenceResponse(output_tensors=tensors)

    def _refusal(self, error: DiagnosticError) -> Any:
        kinds = self.utils.TritonError
        status = getattr(kinds, _STATUS.get(error.code, "INTERNAL"))
        return self.utils.InferenceResponse(output_tensors=[], error=kinds(_line(error), status))


def _refused(required: str, given: str, hint: str = "") -> UsageError:
    return UsageError("SW_TRITON_INPUT", f"a request requires {required}, got {given}", hint=hint)


def _line(error: Exception) -> str:
    """An error as one line: what a client of Triton sees."""
    return " ".join(str(error).split())
