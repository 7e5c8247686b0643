"""Names for torch's own trace (`TORCH_TRACE`): what tlparse shows of a compile stands under our piece and range.

Torch files what it writes under the frame that Dynamo compiles. A piece has no frame: it is given a number and a stack
of its own, its name and its range, and its text as an artifact. Each range is a further compile of the piece.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from piecework.spans import span_subject

_FIRST = 1000  # beyond the frames that Dynamo counts
_lock = threading.Lock()
_frames: dict[str, int] = defaultdict(itertools.count(_FIRST).__next__)
_compiles: dict[str, Iterator[int]] = defaultdict(itertools.count)


@contextmanager
def traced_as_subject(text: str) -> Iterator[None]:
    """File what torch's compiler traces inside the block under what the span around is about; `text` is its source."""
    from torch._guards import CompileContext, CompileId, compile_context
    from torch._logging._internal import trace_log, trace_structured, trace_structured_artifact
    from torch._logging.structured import intern_string

    if not trace_log.handlers:
        yield
        return
    piece, _, box = (span_subject() or "a piece").partition(" for ")
    with _lock:
        number, again = _frames[piece], next(_compiles[piece])
    with compile_context(CompileContext(CompileId(frame_id=number, frame_compile_id=again))):
        names = [name for name in (piece, box) if name]
        stack = [{"line": 0, "name": name, "filename": intern_string("piecework"), "loc": name} for name in names]
        trace_structured("dynamo_start", lambda: {"stack": stack})
        trace_structured_artifact(f"{file_name(piece, box)}.text", "string", lambda: text)
        yield


def file_name(piece: str, box: str) -> str:
    """Name a piece and its range as tlparse's files do, which keep few signs: `piece_0_0a0ee6ac.s0_2-64`."""
    return ".".join(re.sub(r"[^\w-]+", "_", part).strip("_") for part in (piece, box) if part)
