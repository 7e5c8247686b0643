"""Cutting a shared library down to what is loaded."""

from __future__ import annotations

import struct

from piecework.seam.binary import blank_paths, cut_sections


def library(*segments: tuple[int, int, int], size: int = 1000) -> bytes:
    """Make the header of a 64-bit ELF file with program headers of (type, offset, size in the file)."""
    header = bytearray(size)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<QQ", header, 32, 64, 900)  # program headers at 64, section headers at 900
    struct.pack_into("<HHHHH", header, 54, 56, len(segments), 64, 3, 2)
    for index, (kind, offset, length) in enumerate(segments):
        struct.pack_into("<IIQQQQQQ", header, 64 + 56 * index, kind, 0, offset, 0, 0, length, length, 0)
    return bytes(header)


def test_the_file_ends_with_its_last_loaded_segment() -> None:
    data = cut_sections(library((1, 0, 300), (1, 400, 123), (4, 600, 200)))
    assert len(data) == 523
    assert struct.unpack_from("<Q", data, 40) == (0,)
    assert struct.unpack_from("<HHH", data, 58) == (0, 0, 0)


def test_program_headers_are_never_cut() -> None:
    assert len(cut_sections(library((1, 0, 10), (4, 0, 0)))) == 64 + 2 * 56


def test_other_formats_stay_as_they_are() -> None:
    for data in (b"", b"\x7fELF\x01\x01" + bytes(100), b"MZ" + bytes(100)):
        assert cut_sections(data) == data


def test_known_folders_are_blanked_with_the_name_behind_them() -> None:
    data = b"\0/tmp/build/ab/kernel.main.cpp\0/usr/lib/x\0"
    assert blank_paths(data, ("/tmp/build", "", "/")) == b"\0" + b"." * 29 + b"\0/usr/lib/x\0"
