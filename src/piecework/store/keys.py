"""Ed25519 keys as files: a secret one for who signs, public ones for who believes.

    piecework-ed25519-secret <base64 of the 32-byte seed>
    piecework-ed25519 <base64 of the 32-byte public key> <name>

A file of trusted keys holds public ones, one a line; `#` begins a comment.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from piecework.errors import OptionError, StoreError, UntrustedArtifact
from piecework.store.trust import OTHERS_WRITE
from piecework.values.digest import digest_bytes

try:
    from nacl.exceptions import BadSignatureError
    from nacl.signing import SigningKey, VerifyKey
except ImportError as error:
    raise StoreError("signing needs `pynacl`, which is not installed", hint="`pip install piecework[sign]`") from error

SECRET_WORD, PUBLIC_WORD = "piecework-ed25519-secret", "piecework-ed25519"
KEY_BYTES = 32
_NAME = re.compile(r"[\w.@+-]{0,100}")


@dataclass(frozen=True)
class PublicKey:
    """A key whose signatures can be checked; two are equal if their bytes are, whatever their names."""

    data: bytes
    name: str = ""

    @property
    def id(self) -> str:
        """Return the short name by which signatures refer to the key."""
        return digest_bytes(self.data)[:16]

    def is_right(self, signature: bytes, message: bytes) -> bool:
        """Tell whether the holder of the secret signed `message`."""
        try:
            VerifyKey(self.data).verify(message, signature)
        except (BadSignatureError, ValueError, TypeError):
            return False
        return True

    def __str__(self) -> str:
        return f"{PUBLIC_WORD} {base64.b64encode(self.data).decode()} {self.name}".rstrip()


@dataclass(frozen=True)
class SecretKey:
    """A key that signs; never printed."""

    seed: bytes
    name: str = ""

    def __repr__(self) -> str:
        return f"SecretKey({self.public.id})"

    @property
    def public(self) -> PublicKey:
        """Return the key that checks what this one signs."""
        return PublicKey(bytes(SigningKey(self.seed).verify_key), self.name)

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of `message`."""
        return bytes(SigningKey(self.seed).sign(message).signature)


def make_key(path: Path, name: str = "") -> PublicKey:
    """Make a pair of keys: the secret in `path`, which must not exist, the public one beside it under `.pub`."""
    if not _NAME.fullmatch(name):
        raise OptionError(f"`{name}` cannot name a key", hint="a name is one word of letters, digits and `.@+-_`")
    secret = SecretKey(os.urandom(KEY_BYTES), name or path.stem)
    public_path = path.with_suffix(".pub")
    for target, text, mode in (
        (path, f"{SECRET_WORD} {base64.b64encode(secret.seed).decode()}\n", 0o600),
        (public_path, f"{secret.public}\n", 0o644),
    ):
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError as error:
            raise OptionError(f"`{target}` exists", hint="give another name; keys are never replaced") from error
        except OSError as error:
            raise OptionError(f"`{target}` cannot be written: {error.strerror}", hint="name your own folder") from error
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
    return secret.public


def read_secret(path: Path) -> SecretKey:
    """Read a secret key from a file that nobody but its owner can read."""
    text = _read(path)
    if os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UntrustedArtifact(
            f"secret key `{path}` can be read by others than its owner", hint=f"`chmod 600 {path}`, or make a new one"
        )
    word, _, rest = text.strip().partition(" ")
    if word != SECRET_WORD:
        raise OptionError(f"`{path}` holds no secret key", hint="`piecework store keygen FILE.key` makes one")
    return SecretKey(_decode(rest, path), path.stem)


def parse_public(line: str, where: str = "the text") -> PublicKey:
    """Read one public key."""
    words = line.split()
    if len(words) not in (2, 3) or words[0] != PUBLIC_WORD:
        raise OptionError(f"`{line}` in {where} is no public key", hint=f"a public key is `{PUBLIC_WORD} BASE64 NAME`")
    return PublicKey(_decode(words[1], where), words[2] if len(words) == 3 else "")


def read_trusted(path: Path) -> tuple[PublicKey, ...]:
    """Read a file of public keys, one a line; refuse one that others than its owner and root can write."""
    text, status = _read(path), os.stat(path)
    if status.st_mode & OTHERS_WRITE or status.st_uid not in (os.geteuid(), 0):
        raise UntrustedArtifact(
            f"trusted keys `{path}` can be written by another user", hint=f"`chmod go-w {path}`, and own it yourself"
        )
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return tuple(parse_public(line, f"`{path}`") for line in lines if line)


def add_trusted(path: Path, key: PublicKey) -> bool:
    """Add a key to a file of trusted ones, made where it is missing; tell whether it was new."""
    if path.exists() and key.data in {known.data for known in read_trusted(path)}:
        return False
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "a", encoding="ascii") as file:
        file.write(f"{key}\n")
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise OptionError(f"key file `{path}` cannot be read: {reason}", hint="name a file of keys") from error


def _decode(text: str, where: object) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if len(data) != KEY_BYTES:
        raise OptionError(f"the key in {where} is not 32 bytes of base64", hint="copy the line whole")
    return data
