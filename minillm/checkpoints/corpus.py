"""The text that the small models are trained on: a folder of .txt files, or Debian's Jane Austen.

Austen's six novels are in the public domain. Debian's package `r-cran-janeaustenr` (`apt-get download
r-cran-janeaustenr`) holds them as R data, which `read_novels` decodes without R.
"""

from __future__ import annotations

import io
import re
import struct
import tarfile
import zlib
from pathlib import Path

CHAPTER = re.compile(r"^(chapter|letter|preface)\b.{0,12}$", re.IGNORECASE)
EVERY = 20  # of each 20 chapters one goes to validation and one to test


def read_novels(path: str | Path) -> list[list[str]]:
    """Lines of each text at `path`: a folder of .txt files, a .deb of janeaustenr, or its Rdata.rdb.

    Raises ValueError naming `path` where it is none of these.
    """
    path = Path(path)
    if path.is_dir() and (files := sorted(path.glob("*.txt"))):
        return [file.read_text(encoding="utf-8").splitlines() for file in files]
    if path.suffix == ".deb" and path.is_file():
        return decode_lazy_load(member_of_deb(path.read_bytes(), "janeaustenr/data/Rdata.rdb"))
    if path.suffix == ".rdb" and path.is_file():
        return decode_lazy_load(path.read_bytes())
    raise ValueError(f"{path} is neither a folder with .txt files, nor a .deb, nor an .rdb file")


def member_of_deb(deb: bytes, suffix: str) -> bytes:
    """One file out of a Debian package: an `ar` archive with 60-byte headers that holds a tar archive."""
    offset = len(b"!<arch>\n")
    while offset < len(deb):
        name, size = deb[offset : offset + 16].decode().strip(), int(deb[offset + 48 : offset + 58])
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(deb[offset + 60 : offset + 60 + size])) as tar:
                return next(tar.extractfile(m).read() for m in tar if m.name.endswith(suffix))
        offset += 60 + size + size % 2
    raise ValueError(f"no {suffix} in this package")


def decode_lazy_load(database: bytes) -> list[list[str]]:
    """Character vectors of an R lazy-load database: each record a length and a zlib stream of R's XDR form."""
    texts, offset = [], 0
    while offset < len(database):
        stream = zlib.decompressobj()
        texts.append(decode_strings(stream.decompress(database[offset + 4 :])))
        offset = len(database) - len(stream.unused_data)
    return texts


def decode_strings(data: bytes) -> list[str]:
    """Strings of one serialized R character vector (XDR, version 3)."""
    (encoding_length,) = struct.unpack(">i", data[14:18])
    offset = 18 + encoding_length
    kind, count = struct.unpack(">ii", data[offset : offset + 8])
    if kind & 0xFF != 16:  # STRSXP
        raise ValueError(f"expected a character vector, got R type {kind & 0xFF}")
    offset += 8
    strings = []
    for _ in range(count):
        (length,) = struct.unpack(">i", data[offset + 4 : offset + 8])
        strings.append(data[offset + 8 : offset + 8 + max(length, 0)].decode("utf-8"))
        offset += 8 + max(length, 0)
    return strings


def chapters(lines: list[str]) -> list[str]:
    """Chapters of one novel, each unwrapped to one line a paragraph, paragraphs apart by an empty line."""
    paragraphs, current = [[]], []
    for line in [*lines, ""]:
        line = line.strip()
        if CHAPTER.match(line) and not current:
            paragraphs.append([])
        if line:
            current.append(line)
        elif current:
            paragraphs[-1].append(" ".join(" ".join(current).split()))
            current = []
    return ["\n\n".join(chapter) for chapter in paragraphs if sum(map(len, chapter)) > 500]


def split(path: str | Path) -> dict[str, list[str]]:
    """Chapters by their use: "train", "validation" (every 20th) and "test" (another 20th)."""
    parts = {"train": [], "validation": [], "test": []}
    for index, chapter in enumerate(c for novel in read_novels(path) for c in chapters(novel)):
        use = {EVERY // 2: "validation", EVERY - 1: "test"}.get(index % EVERY, "train")
        parts[use].append(chapter)
    return parts
