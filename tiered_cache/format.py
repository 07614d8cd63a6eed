"""The file of one piece: a safetensors container whose header proves what it holds. Bytes only.

Owns names, header and checksums. The reader takes every size from the `Layout` of the live model and compares the header, byte
for byte, with the one it would have written itself: nothing in a file decides how much is read or allocated, and no parser
ever sees it. Refuses to own files and directories (tiers/disk). docs/storage-format.md says the same for strangers.
"""

import base64
import binascii
import functools
import hashlib
import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import xxhash

from tiered_cache.errors import CorruptEntryError
from tiered_cache.keys import TOKEN_NBYTES, block_key

FORMAT = "tiered_cache/1"
ALIGNMENT = 4096  # of the payload in its file
CHUNK_NBYTES = 1 << 20  # of payload under one checksum
HEAD_TOKENS = 16  # that siblings are told apart by in their names
SHORT_KEY_NBYTES = 16  # of a key in a name; the header holds all of it

_DIGEST_DIGITS = 32  # of xxh3-128
_TIME_DIGITS = 15  # of milliseconds
_SHA_AT = len('{"__metadata__":{"sha256":"') + 8
_SHA_DIGITS = 64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor in a payload, as safetensors writes it down: `start` and `stop` are bytes from the payload's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Layout(Hashable, Protocol):
    """How the bytes of a model's blocks are laid out. Equal layouts hash equal."""

    def nbytes(self, kind: str, num_tokens: int) -> int:
        """Return the payload of a piece of `num_tokens` tokens, in bytes."""

    def tensors(self, kind: str, num_tokens: int) -> Sequence[TensorSpec]:
        """Return what is in that payload, without gaps, in order."""


@dataclass(frozen=True, slots=True)
class Name:
    """What the name of a piece's file says."""

    key: bytes  # `[SHORT_KEY_NBYTES]`
    parent: bytes  # `[SHORT_KEY_NBYTES]`
    num_tokens: int
    head: bytes  # `[4]`, see `head_of`
    is_side: bool

    @classmethod
    def of(cls, key: bytes, parent: bytes, tokens: bytes, is_side: bool) -> Self:
        """Return the name for full keys and encoded tokens."""
        short = SHORT_KEY_NBYTES
        return cls(key[:short], parent[:short], len(tokens) // TOKEN_NBYTES, head_of(parent, tokens), is_side)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return what a file's name says, or None where it is none of ours."""
        stem, dot, kind = text.partition(".")
        fields = stem.split("-")
        if not dot or kind not in ("kv", "side.kv") or len(fields) != 4:
            return None
        try:
            name = cls(
                bytes.fromhex(fields[0]), bytes.fromhex(fields[1]), int(fields[2]), bytes.fromhex(fields[3]), kind != "kv"
            )
        except ValueError:
            return None
        sizes = len(name.key), len(name.parent), len(name.head)
        is_ours = sizes == (SHORT_KEY_NBYTES, SHORT_KEY_NBYTES, 4) and name.num_tokens > 0 and str(name) == text
        return name if is_ours else None

    def __str__(self) -> str:
        kind = "side.kv" if self.is_side else "kv"
        return f"{self.key.hex()}-{self.parent.hex()}-{self.num_tokens}-{self.head.hex()}.{kind}"


def head_of(parent: bytes, tokens: bytes) -> bytes:
    """Return 4 bytes that depend on the first `HEAD_TOKENS` of encoded `tokens`, keyed by their parent's key."""
    return hashlib.sha256(parent + tokens[: HEAD_TOKENS * TOKEN_NBYTES]).digest()[:4]


@dataclass(frozen=True, slots=True)
class Spec:
    """What the live side knows of a piece before it looks at the file.

    Attributes:
        identity, namespace: digests of the model and of the namespace.
        parent: full key of the block before it.
        kind: "main" or "side".
        num_tokens: in the block.
        layout: of the live model.
    """

    identity: bytes
    namespace: bytes
    parent: bytes
    kind: str
    num_tokens: int
    layout: Layout

    @property
    def header_nbytes(self) -> int:
        """Return the header's size in the file, a multiple of `ALIGNMENT`: it depends on nothing but this."""
        return _header_nbytes(self.layout, self.kind, self.num_tokens, len(self.identity), len(self.namespace))

    @property
    def payload_nbytes(self) -> int:
        return self.layout.nbytes(self.kind, self.num_tokens)

    @property
    def file_nbytes(self) -> int:
        return self.header_nbytes + self.payload_nbytes


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says beyond its `Spec`. Times in milliseconds, since 1970 and of life; a `ttl_ms` of 0 is for ever."""

    tokens: bytes
    created_ms: int
    ttl_ms: int
    checksums: tuple[bytes, ...]

    def is_expired(self, now_ms: int) -> bool:
        """Say whether its time is over. A clock that went back by more than a minute cannot say, so that counts as over."""
        return self.ttl_ms > 0 and not self.created_ms - 60_000 <= now_ms < self.created_ms + self.ttl_ms


def checksums(payload: memoryview) -> tuple[bytes, ...]:
    """Return the xxh3-128 of each chunk of a payload."""
    return tuple(xxhash.xxh3_128_digest(chunk) for chunk in chunks(payload))


def chunks(payload: memoryview) -> Iterator[memoryview]:
    """Cut a payload into what is under one checksum each."""
    for start in range(0, len(payload), CHUNK_NBYTES):
        yield payload[start : start + CHUNK_NBYTES]


def num_chunks(nbytes: int) -> int:
    """Return how many checksums a payload has."""
    return -(-nbytes // CHUNK_NBYTES)


def encode_header(spec: Spec, header: Header) -> bytes:
    """Return the bytes of a file before its payload."""
    text = _text(
        spec,
        key=block_key(spec.parent, header.tokens).hex(),
        created=f"{header.created_ms:0{_TIME_DIGITS}d}",
        ttl=f"{header.ttl_ms:0{_TIME_DIGITS}d}",
        checksums=b"".join(header.checksums).hex(),
        tokens=base64.b64encode(header.tokens).decode(),
    ).encode()
    raw = (len(text).to_bytes(8, "little") + text).ljust(spec.header_nbytes)
    raw = (len(raw) - 8).to_bytes(8, "little") + raw[8:]
    digest = hashlib.sha256(raw).hexdigest().encode()
    return raw[:_SHA_AT] + digest + raw[_SHA_AT + _SHA_DIGITS :]


def parse_header(spec: Spec, raw: bytes) -> Header:
    """Return what a header says, if every byte of it is as this module writes it for `spec`.

    Raises:
        CorruptEntryError: it is not.
    """
    try:
        header = _slice_header(spec, raw)
        fits = len(header.tokens) == spec.num_tokens * TOKEN_NBYTES and header.created_ms >= 0 and header.ttl_ms >= 0
        intact = fits and encode_header(spec, header) == raw
    except (ValueError, binascii.Error):
        intact = False
    if not intact:
        raise CorruptEntryError("the header is damaged, or of another block, model or version")
    return header


def _slice_header(spec: Spec, raw: bytes) -> Header:
    """Read the fields from where they must be. Everything else is checked by encoding them again."""
    at = _first_field(spec)
    num_checksums = num_chunks(spec.payload_nbytes)
    values = []
    for name, size in (
        ("key", 64),
        ("num_tokens", len(str(spec.num_tokens))),
        ("created", _TIME_DIGITS),
        ("ttl", _TIME_DIGITS),
        ("chunk", len(str(CHUNK_NBYTES))),
        ("checksums", num_checksums * _DIGEST_DIGITS),
        ("tokens", _base64_digits(spec.num_tokens)),
    ):
        at += len(f'"{name}":"')
        values.append(raw[at : at + size])
        at += size + len('",')
    _, _, created, ttl, _, digests, tokens = values
    both = bytes.fromhex(digests.decode())
    size = _DIGEST_DIGITS // 2
    return Header(
        tokens=base64.b64decode(tokens, validate=True),
        created_ms=int(created),
        ttl_ms=int(ttl),
        checksums=tuple(both[start : start + size] for start in range(0, len(both), size)),
    )


def _first_field(spec: Spec) -> int:
    return 8 + len(_text_before_key(spec))


def _text_before_key(spec: Spec) -> str:
    return (
        f'{{"__metadata__":{{"sha256":"{"0" * _SHA_DIGITS}","format":"{FORMAT}","identity":"{spec.identity.hex()}",'
        f'"namespace":"{spec.namespace.hex()}","kind":"{spec.kind}","parent":"{spec.parent.hex()}",'
    )


def _text(spec: Spec, key: str, created: str, ttl: str, checksums: str, tokens: str) -> str:
    return (
        f'{_text_before_key(spec)}"key":"{key}","num_tokens":"{spec.num_tokens}","created":"{created}","ttl":"{ttl}",'
        f'"chunk":"{CHUNK_NBYTES}","checksums":"{checksums}","tokens":"{tokens}"}}'
        f"{_tensor_table(spec.layout, spec.kind, spec.num_tokens)}"
    )


@functools.lru_cache(maxsize=1024)
def _tensor_table(layout: Layout, kind: str, num_tokens: int) -> str:
    table = {
        tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [tensor.start, tensor.stop]}
        for tensor in layout.tensors(kind, num_tokens)
    }
    return "," + json.dumps(table, separators=(",", ":"))[1:]


@functools.lru_cache(maxsize=1024)
def _header_nbytes(layout: Layout, kind: str, num_tokens: int, identity_nbytes: int, namespace_nbytes: int) -> int:
    spec = Spec(bytes(identity_nbytes), bytes(namespace_nbytes), bytes(32), kind, num_tokens, layout)
    text = _text(
        spec,
        key="0" * 64,
        created="0" * _TIME_DIGITS,
        ttl="0" * _TIME_DIGITS,
        checksums="0" * (num_chunks(spec.payload_nbytes) * _DIGEST_DIGITS),
        tokens="A" * _base64_digits(num_tokens),
    )
    return -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT


def _base64_digits(num_tokens: int) -> int:
    return -(-num_tokens * TOKEN_NBYTES // 3) * 4
