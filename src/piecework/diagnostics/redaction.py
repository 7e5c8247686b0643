"""Take out of text what must not leave a machine: secrets, the user's name, and where files lie.

What is known to be secret (values of variables that are named like secrets) is taken out wherever it stands; what looks
like a token or a password in an address is taken out without being known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

REMOVED = "[removed]"
_NAMED_LIKE_SECRETS = re.compile(r"(?i)token|secret|passw|credential|api_?key|access_?key|private|auth|cookie|session")
_LOOKS_SECRET = (
    re.compile(r"\b(?:hf|ghp|gho|ghs|glpat|xox[abp]|sk|pk|rk)[_-][A-Za-z0-9_-]{12,}"),
    re.compile(r"\bgithub_pat_[A-Za-z0-9_]{20,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]{8,}"),
    re.compile(r"(?<=://)[^/\s\"'@]+(?=@)"),
    re.compile(r"(?i)(?<=[?&;])(?:[\w-]*(?:token|key|secret|signature|sig|password|auth)[\w-]*)=[^&\s\"'#]+"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL),
)
# An absolute path: not the rest of an address, of a relative path or of a fraction.
_PATH = re.compile(r"(?<![\w.~/:…\]-])/(?:[\w.@+=%~-]+/)+[\w.@+=%~-]*")
# What lies in a package is told from there on, whichever folder of ours the package lies in.
_TO_PACKAGES = re.compile(r"/?(?:[\w.@+=%~-]+/)*(?:site|dist)-packages/")


@dataclass(frozen=True)
class Redaction:
    """What stands for what: `places` are folders by the word that replaces them, `secrets` are taken out whole."""

    secrets: tuple[str, ...] = ()
    places: tuple[tuple[str, str], ...] = ()
    words: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, variables: Mapping[str, str], places: Mapping[str, str], words: Mapping[str, str]) -> Redaction:
        """Make the redaction of a machine: its variables, folders by what they are called, names of user and host."""
        secrets = {v for name, v in variables.items() if _NAMED_LIKE_SECRETS.search(name) and len(v) >= 6}
        secrets = {value for value in secrets if not value.startswith("/")}  # a file's place: its path goes, not more
        found = {path.rstrip("/"): f"[{word}]" for word, path in places.items() if len(path.rstrip("/")) > 1}
        known = {word: f"[{what}]" for what, word in words.items() if len(word) > 2 and word != "root"}
        return cls(
            tuple(sorted(secrets, key=len, reverse=True)),
            tuple(sorted(found.items(), key=lambda pair: -len(pair[0]))),
            tuple(sorted(known.items(), key=lambda pair: -len(pair[0]))),
        )

    def apply(self, text: str) -> str:
        """Return the text without what must not leave."""
        for secret in self.secrets:
            for form in {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}:
                text = text.replace(form, REMOVED)
        for pattern in _LOOKS_SECRET:
            text = pattern.sub(REMOVED, text)
        text = _TO_PACKAGES.sub("…/", text)
        for path, word in self.places:
            text = re.sub(re.escape(path) + r"(?![\w-])", word, text)
        text = _PATH.sub(_shorten, text)
        for name, word in self.words:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", word, text)
        return text


def _shorten(match: re.Match[str]) -> str:
    """Keep of a path its last part, which tells which file it is."""
    return f"…/{match[0].rstrip('/').rpartition('/')[2]}"
