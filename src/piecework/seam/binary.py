"""Bytes of compiled kernels: cut away what is not run, and what tells of the machine that built them."""

from __future__ import annotations

import re
import struct

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little endian
_LOAD = 1


def cut_sections(data: bytes) -> bytes:
    """Return a shared library without its section table, debug information and symbol names.

    The dynamic loader reads program headers alone; what lies behind the last loaded segment holds paths of the building
    machine and three quarters of the bytes. Anything but 64-bit ELF is returned as it is.
    """
    if not data.startswith(_MAGIC):
        return data
    table, entry_size, count = _program_headers(data)
    end = table + entry_size * count
    for index in range(count):
        kind, _, offset, _, _, size_in_file = struct.unpack_from("<IIQQQQ", data, table + index * entry_size)
        if kind == _LOAD:
            end = max(end, offset + size_in_file)
    header = bytearray(data[:end])
    struct.pack_into("<Q", header, 40, 0)  # e_shoff
    struct.pack_into("<HHH", header, 58, 0, 0, 0)  # e_shentsize, e_shnum, e_shstrndx
    return bytes(header)


def _program_headers(data: bytes) -> tuple[int, int, int]:
    (table,) = struct.unpack_from("<Q", data, 32)
    entry_size, count = struct.unpack_from("<HH", data, 54)
    return table, entry_size, count


def blank_paths(data: bytes, folders: tuple[str, ...]) -> bytes:
    """Overwrite each path under one of `folders` by dots of the same length; messages hold names of source files.

    Only known folders are looked for: what else looks like a path may be code.
    """
    for folder in sorted({f.rstrip("/") for f in folders if len(f) > 3}, key=len, reverse=True):
        pattern = re.compile(re.escape(folder.encode()) + rb"[\w.+@/-]*")
        data = pattern.sub(lambda match: b"." * len(match.group()), data)
    return data
