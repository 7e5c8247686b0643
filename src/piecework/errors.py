"""What can go wrong, as one tree; every error carries a hint and its facts.

    PieceworkError
    ├── OptionError            a value the caller gave cannot be used          exit 2
    ├── ModelError             a model folder or model that cannot be served   exit 1
    ├── TraceError             the model does not trace to one full graph      exit 1
    │   └── ContractError      an operator does what its schema does not say   exit 1
    ├── GuardError             a guard that no declared range can hold         exit 1
    ├── SplitError             the graph cannot be cut as asked                exit 1
    ├── PassError              a pass broke the graph                          exit 1
    ├── CompileError           a piece did not compile for a range             exit 1
    │   └── CompileForbidden   something compiled under `no_compile()`         exit 1
    ├── StoreError             the store could not serve                       exit 1
    │   ├── ArtifactMissing    nothing is stored under the key                 exit 3
    │   ├── CorruptEntry       bytes differ from what was recorded             exit 1
    │   ├── FormatTooNew       written by a later release                      exit 4
    │   ├── Incompatible       made for another toolchain or machine           exit 4
    │   ├── StoreUnwritable    the folder takes no writes                      exit 1
    │   └── UntrustedArtifact  owner, mode or signature does not allow it      exit 5
    ├── BindError              weights or operators do not fit the record      exit 1
    ├── StepError              an opaque body ran outside its step             exit 1
    ├── EngineError            the engine is not there, or can go on no more   exit 1
    ├── InputError             a call's arguments do not fit the signature     exit 1
    │   └── ShapeOutOfRange    a size outside the declared ranges              exit 1
    ├── CaptureError           a capture failed or may not happen now          exit 1
    └── ParallelError          the ranks of a start cannot go on together      exit 1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PieceworkError(Exception):
    """Say what happened to what; `hint` says what to do, `facts` hold the values as data."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts: dict[str, Any] = dict(facts or {})

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class OptionError(PieceworkError):
    """A value that the caller gave cannot be used: unknown, contradictory or out of bounds."""

    exit_code = 2


class ModelError(PieceworkError):
    """A model folder or a model that is missing, damaged, or of a kind that is not served."""


class TraceError(PieceworkError):
    """The model does not trace to one full graph; names the user's file and line where one is known."""


class ContractError(TraceError):
    """An operator does what its schema or its fake does not say; names the operator and the argument."""


class GuardError(PieceworkError):
    """A guard that holds for some sizes of the declared ranges only; names the user's line."""


class SplitError(PieceworkError):
    """The graph cannot be cut at the operators asked for."""


class PassError(PieceworkError):
    """A pass left a graph that is not well formed; names the pass and shows the difference."""


class CompileError(PieceworkError):
    """A piece did not compile for a range; names both and where the graph was written."""


class CompileForbidden(CompileError):
    """Something compiled while `no_compile()` was in force."""


class StoreError(PieceworkError):
    """The store could not serve a request."""


class ArtifactMissing(StoreError):
    """Nothing is stored under the key."""

    exit_code = 3


class CorruptEntry(StoreError):
    """The bytes of an entry differ from what was recorded when it was written."""


class FormatTooNew(StoreError):
    """The entry was written by a later release of Piecework."""

    exit_code = 4


class Incompatible(StoreError):
    """The entry was made for another toolchain or machine than this one."""

    exit_code = 4


class StoreUnwritable(StoreError):
    """The store's folder takes no writes."""


class UntrustedArtifact(StoreError):
    """Owner, mode, link or signature of an entry does not allow loading code from it."""

    exit_code = 5


class BindError(PieceworkError):
    """Weights or operator bodies do not fit the record they are bound to."""


class StepError(PieceworkError):
    """An opaque body was called outside the step that holds its cache and metadata."""


class EngineError(PieceworkError):
    """The engine is not there yet, has failed, or is closing."""


class InputError(PieceworkError):
    """A call's arguments do not fit the signature the program was compiled for."""


class ShapeOutOfRange(InputError):
    """A size lies outside the ranges the program was compiled for."""


class CaptureError(PieceworkError):
    """A capture failed, or was asked for where it may not happen."""


class ParallelError(PieceworkError):
    """The ranks that share a model cannot go on together: one is gone, or they came to different things."""
