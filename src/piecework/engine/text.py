"""An answer's tokens become text as they come, and stop strings are cut off before anybody sees them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from piecework.errors import ModelError
from piecework.models.folder import ModelFolder


def read_tokenizer(folder: ModelFolder) -> Tokenizer:
    """Read a folder's fast tokenizer, without any model library."""
    file = folder.tokenizer_file
    if file is None:
        raise ModelError(
            f"there is no `tokenizer.json` in `{folder.path}`",
            hint="give token ids: `--prompt-ids 1,2,3`, or a list of ints",
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(
            f"`{file.name}` in `{folder.path}` cannot be read: {error}",
            hint="the file is damaged: fetch it again, or give token ids: `--prompt-ids 1,2,3`",
            facts={"file": str(file)},
        ) from error


class TextStream:
    """The text of one answer: only what no later token can change, and no beginning of a stop string, goes out."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._text = ""
        self._num_sent = 0

    def add(self, token_id: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add a token; return what may go out now, and the stop string that ended the text, if one did."""
        if self._tokenizer is None:
            return "", None
        self._ids.append(token_id)
        searched = len(self._text)
        self._text += self._stream.step(self._tokenizer, token_id) or ""
        if may_stop and self._stop and len(self._text) > searched:
            found = self._find(searched)
            if found is not None:
                start, stop = found
                self._text = self._text[:start]
                return self._send(start), stop
        return self._send(len(self._text) - self._held_back()), None

    def end(self) -> str:
        """Return what was held back, an incomplete character included, now that nothing follows."""
        if self._tokenizer is None:
            return ""
        whole = self._tokenizer.decode(self._ids)
        if whole.startswith(self._text):
            self._text = whole
        return self._send(len(self._text))

    def _find(self, searched: int) -> tuple[int, str] | None:
        """Return where the first stop string begins that ends in what is new."""
        found = []
        for stop in self._stop:
            at = self._text.find(stop, max(self._num_sent, searched - len(stop) + 1))
            if at >= 0:
                found.append((at, stop))
        return min(found, key=lambda each: each[0]) if found else None

    def _held_back(self) -> int:
        """Return the length of the longest end of the text that may be a stop string's beginning."""
        unsent = len(self._text) - self._num_sent
        return max(
            (n for stop in self._stop for n in range(1, min(len(stop), unsent + 1)) if self._text.endswith(stop[:n])),
            default=0,
        )

    def _send(self, end: int) -> str:
        text = self._text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        return text
