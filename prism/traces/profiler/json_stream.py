"""Profiler JSON as a stream of decoded batches of events: bounded memory, and one kind of error.

A file is ``{... "traceEvents": [event, event, ...], ...}`` or the bare list. It is read in pieces that end
between two events, each decoded by itself into typed structs; memory is that of one piece, whatever the
size of the file. A piece that is not JSON is repaired where profilers are known to write it wrongly (bare
``nan``, ``inf`` and ``N/A``, backslashes of Windows paths), and refused otherwise.
"""

from __future__ import annotations

import gzip
import io
import itertools
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from prism.traces.records import TraceError

PIECE = 1 << 21
#: text without a boundary between events, a single event or a header, is not read beyond this
LARGEST_PIECE = 128 << 20
#: a compressed file may grow by so much; profiler traces shrink about 20-fold
LARGEST_RATIO = 400
#: small files may grow by more
ALWAYS_ALLOWED = 256 << 20

_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
#: the list ends after an event, or after nothing at all
_END = re.compile(rb"(?:\}|\A\[?)\s*\]")
_TOKEN = re.compile(
    rb'"(?:[^"\\]|\\.)*"|-?\b(?:nan|NaN|inf|Infinity|N/A|NA)\b(?:\([^)]*\))?', re.DOTALL
)
_BAD_ESCAPE = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')


class EventStream:
    """Events of one file in batches; `header` holds the rest of the document after the last one.

    Parameters
    ----------
    path : Path
    batch : type
        What a batch is decoded to: a list of a msgspec Struct.

    Raises
    ------
    TraceError
        While iterating: unreadable, empty, truncated or damaged file.
    """

    def __init__(self, path: Path, batch: Any) -> None:
        self.path = path
        self.decoder = msgspec.json.Decoder(batch, strict=False)
        self.header: dict[str, Any] = {}
        self.repaired = 0

    def __iter__(self) -> Iterator[list]:
        try:
            with self.path.open("rb") as raw:
                yield from self._batches(_Bounded(self.path, raw))
        except (OSError, EOFError, zlib.error) as fault:
            said = "truncated gzip" if isinstance(fault, EOFError) else f"not readable: {fault}"
            raise TraceError(f"{self.path}: {said}") from fault

    def _batches(self, source: _Bounded) -> Iterator[list]:
        before, rest = self._head(source)
        text = _Window(rest)
        while source.fill(text):
            if (batch := self._cut(text)) is not None:
                yield batch
            elif text.size > LARGEST_PIECE:
                self._damaged(text, "no boundary between events")
        batch, after = self._tail(text)
        yield batch
        self.header = self._document(before, after)

    def _head(self, source: _Bounded) -> tuple[bytes, bytes]:
        """Text before the list of events, and what has been read of the list."""
        text = b""
        while True:
            more = source.read(PIECE >> 4)
            text += more
            if text.lstrip()[:1] == b"[":
                return b"", text[text.index(b"[") + 1 :]
            found = _EVENTS.search(text)
            if found:
                return text[: found.start()], text[found.end() :]
            if not more or len(text) > LARGEST_PIECE:
                break
        if not text.strip():
            raise TraceError(f"{self.path}: empty file")
        if text.lstrip()[:1] != b"{":
            raise TraceError(f"{self.path}: not JSON, it begins with {text[:20]!r}")
        if not text.rstrip().endswith(b"}"):
            raise TraceError(f"{self.path}: truncated, it ends before any traceEvents")
        raise TraceError(f"{self.path}: no traceEvents in it, so it is no profiler trace")

    def _cut(self, text: _Window) -> list | None:
        """Decode up to the last boundary; none if there is no boundary that makes whole events."""
        for first in text.windows():
            found = list(_BOUNDARY.finditer(text.buffer, first, text.end))
            if found:
                break
        for boundary in reversed(found[-8:]):
            batch = self._decoded(text.as_list(boundary.start() + 1))
            if batch is not None:
                text.drop(boundary.end())
                return batch
        return None

    def _tail(self, text: _Window) -> tuple[list, bytes]:
        """Decode the last events: the list ends at the first bracket that makes a whole list."""
        tried: set[int] = set()
        for first in text.windows():
            found = _END.finditer(text.buffer, first, text.end)
            for end in [m.end() - 1 for m in itertools.islice(found, 32)]:
                if end in tried:
                    continue
                tried.add(end)
                batch = self._decoded(text.as_list(end))
                if batch is not None:
                    return batch, bytes(text.buffer[end + 1 : text.end])
        if not tried:
            raise TraceError(f"{self.path}: truncated, the list of events does not end")
        text.end = max(tried) + 1
        return self._damaged(text, "")

    def _decoded(self, piece: memoryview) -> list | None:
        try:
            return self.decoder.decode(piece)
        except (msgspec.ValidationError, UnicodeDecodeError) as fault:
            raise TraceError(f"{self.path}: an event is not as it should be: {fault}") from None
        except (msgspec.DecodeError, RecursionError):
            repaired = _repaired(bytes(piece))
            if repaired == piece:
                return None
        try:
            batch = self.decoder.decode(repaired)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        self.repaired += 1
        return batch

    def _damaged(self, text: _Window, what: str) -> list:
        """Raise with the place of the first fault."""
        piece = bytes(text.as_list(text.end))
        escape = " (invalid escape)" if _invalid_escape(piece) else ""
        try:
            self.decoder.decode(piece)
            said = what
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
            said = what or str(fault)
        raise TraceError(
            f"{self.path}: damaged or truncated within its last {len(piece)} bytes "
            f"({piece.count(10) + 1} lines){escape}: {said or 'not a list of events'}"
        )

    def _document(self, before: bytes, after: bytes) -> dict[str, Any]:
        """Return the document around the events, as a mapping; a bare list has nothing."""
        if not before.strip() and not after.strip():
            return {}
        text = before.rstrip() + b'"traceEvents": []' + after
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        try:
            return msgspec.json.decode(_repaired(text), type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
            said = "truncated" if not text.rstrip().endswith(b"}") else str(fault)
            raise TraceError(f"{self.path}: damaged around its events: {said}") from None


class _Window:
    """Text at hand: ``buffer[begin:end]``. One byte before it and one after may be written over, so that
    a piece becomes a list in place."""

    def __init__(self, text: bytes) -> None:
        self.buffer = bytearray(PIECE + (PIECE >> 3))
        self.begin, self.end = 1, 1 + len(text)
        self.buffer[1 : self.end] = text

    @property
    def size(self) -> int:
        return self.end - self.begin

    def room(self) -> memoryview:
        """Make room to read more: the text moves to the front, the buffer grows if it is full."""
        size = self.size
        if self.begin > 1:
            self.buffer[1 : 1 + size] = self.buffer[self.begin : self.end]
            self.begin, self.end = 1, 1 + size
        if size > len(self.buffer) // 2:
            grown = bytearray(2 * len(self.buffer))
            grown[: self.end] = self.buffer[: self.end]
            self.buffer = grown
        return memoryview(self.buffer)[self.end : -1]

    def windows(self) -> Iterator[int]:
        """Begins of ever larger parts at the end of the text, the last one all of it."""
        size = 1 << 16
        while size < self.size:
            yield self.end - size
            size <<= 3
        yield self.begin

    def as_list(self, end: int) -> memoryview:
        """The text up to `end`, between brackets."""
        self.buffer[self.begin - 1] = ord("[")
        kept = self.buffer[end]
        if kept not in b",]":
            # not at a separator: a copy, so that nothing is lost
            return memoryview(bytes(self.buffer[self.begin - 1 : end]) + b"]")
        self.buffer[end] = ord("]")
        return memoryview(self.buffer)[self.begin - 1 : end + 1]

    def drop(self, begin: int) -> None:
        """Forget the text before `begin`."""
        self.begin = begin


class _Bounded:
    """Plain or gzip bytes, told by their first two bytes and not by the name; growth is bounded."""

    def __init__(self, path: Path, raw: BinaryIO) -> None:
        self.path = path
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0, io.SEEK_END)
        self.allowed = max(ALWAYS_ALLOWED, LARGEST_RATIO * raw.tell())
        raw.seek(0)
        self.file: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        self.seen = 0

    def read(self, size: int) -> bytes:
        text = self.file.read(size)
        self._count(len(text))
        return text

    def fill(self, text: _Window) -> bool:
        """Read on until the window holds a piece; False at the end of the file."""
        while True:
            room = text.room()
            n = self.file.readinto(room)
            del room
            self._count(n)
            text.end += n
            if n == 0 or text.size >= PIECE:
                return n > 0

    def _count(self, n: int) -> None:
        self.seen += n
        if self.seen > self.allowed:
            raise TraceError(
                f"{self.path}: decompresses to over {self.allowed >> 20} MB, {LARGEST_RATIO} times its "
                "size; unpack it yourself if that is meant"
            )


def _repaired(text: bytes) -> bytes:
    """Bare tokens that are no JSON become null, single backslashes are doubled."""

    def fix(found: re.Match[bytes]) -> bytes:
        token = found.group()
        if token[:1] != b'"':
            return b"null"
        return _BAD_ESCAPE.sub(rb"\\\\", token) if b"\\" in token else token

    return _TOKEN.sub(fix, text)


def _invalid_escape(text: bytes) -> bool:
    return any(_BAD_ESCAPE.search(m.group()) for m in _TOKEN.finditer(text))
