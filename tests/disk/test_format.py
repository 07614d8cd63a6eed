import base64
import hashlib
import json
import random
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import safetensors
import safetensors.numpy

from tests.disk.store import Flat
from tiered_cache import format as file_format
from tiered_cache.errors import CorruptEntryError
from tiered_cache.format import (
    ALIGNMENT,
    CHUNK_NBYTES,
    FORMAT,
    HEAD_TOKENS,
    Header,
    Name,
    Spec,
    TensorSpec,
    checksums,
    chunks,
    encode_header,
    head_of,
    num_chunks,
    parse_header,
)
from tiered_cache.keys import MAIN, SIDE, TOKEN_NBYTES, block_key

SHA = slice(len('{"__metadata__":{"sha256":"') + 8, len('{"__metadata__":{"sha256":"') + 8 + 64)
MODERATE = pytest.param(3_000, id="3000")
MANY = pytest.param(100_000, id="100000", marks=pytest.mark.slow)


@dataclass(frozen=True)
class Layers:
    """Keys and values of `num_layers` layers in float16, as models have them."""

    num_layers: int = 30
    num_heads: int = 3
    head_size: int = 64

    def nbytes(self, kind: str, num_tokens: int) -> int:
        return self.num_layers * 2 * self._one(num_tokens)

    def tensors(self, kind: str, num_tokens: int) -> Sequence[TensorSpec]:
        one, shape = self._one(num_tokens), (self.num_heads, num_tokens, self.head_size)
        names = [f"layers.{layer}.{part}" for layer in range(self.num_layers) for part in ("key", "value")]
        return [TensorSpec(name, "F16", shape, at * one, (at + 1) * one) for at, name in enumerate(names)]

    def _one(self, num_tokens: int) -> int:
        return self.num_heads * num_tokens * self.head_size * 2


def sample(num_tokens: int = 48, layout: Flat | Layers | None = None, kind: str = MAIN) -> tuple[Spec, Header, bytes]:
    """Return what a piece's header is made of, and its payload."""
    generator = random.Random(num_tokens)
    spec = Spec(b"i" * 32, b"n" * 16, generator.randbytes(32), kind, num_tokens, layout or Layers())
    payload = generator.randbytes(spec.payload_nbytes)
    tokens = generator.randbytes(num_tokens * TOKEN_NBYTES)
    return spec, Header(tokens, 1_790_000_000_123, 60_000, checksums(memoryview(payload))), payload


# --- names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_side", [False, True])
def test_names_come_back(is_side: bool) -> None:
    generator = random.Random(0)
    for num_tokens in (1, 7, 16, 255, 256, 1_000_000):
        key, parent = generator.randbytes(32), generator.randbytes(32)
        name = Name.of(key, parent, generator.randbytes(min(num_tokens, 256) * TOKEN_NBYTES), is_side)
        name = replace(name, num_tokens=num_tokens)
        assert Name.parse(str(name)) == name
        assert (name.key, name.parent) == (key[:16], parent[:16])
        assert "/" not in str(name)
        assert len(str(name)) < 100


KEY, PARENT, HEAD = "ab" * 16, "cd" * 16, "0123abcd"


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "..",
        ".kv",
        "lock",
        "CACHEDIR.TAG",
        "model.json",
        f"{KEY}.pin",
        f"{KEY}.ttl",
        f".tmp-{KEY}",
        f"{KEY}-{PARENT}-8-{HEAD}",
        f"{KEY}-{PARENT}-8-{HEAD}.",
        f"{KEY}-{PARENT}-8-{HEAD}.k",
        f"{KEY}-{PARENT}-8-{HEAD}.kv2",
        f"{KEY}-{PARENT}-8-{HEAD}.KV",
        f"{KEY}-{PARENT}-8-{HEAD}.kv.kv",
        f"{KEY}-{PARENT}-8-{HEAD}.side",
        f"{KEY}-{PARENT}-8-{HEAD}.side.kv~",
        f"{KEY}-{PARENT}-8.kv",
        f"{KEY}-{PARENT}-8-{HEAD}-{HEAD}.kv",
        f"{KEY}_{PARENT}_8_{HEAD}.kv",
        f"{KEY.upper()}-{PARENT}-8-{HEAD}.kv",
        f"{KEY}-{PARENT}-08-{HEAD}.kv",
        f"{KEY}-{PARENT}-+8-{HEAD}.kv",
        f"{KEY}-{PARENT}--8-{HEAD}.kv",
        f"{KEY}-{PARENT}- 8-{HEAD}.kv",
        f"{KEY}-{PARENT}-8_0-{HEAD}.kv",
        f"{KEY}-{PARENT}-٨-{HEAD}.kv",
        f"{KEY}-{PARENT}-8.0-{HEAD}.kv",
        f"{KEY}-{PARENT}-{'9' * 5000}-{HEAD}.kv",
        f"{KEY}-{PARENT}--{HEAD}.kv",
        f" {KEY}-{PARENT}-8-{HEAD}.kv",
        f"{KEY}-{PARENT}-8-{HEAD}.kv\n",
        f"{KEY[:-1]}-{PARENT}-8-{HEAD}.kv",
        f"{KEY[:-1]}g-{PARENT}-8-{HEAD}.kv",
        f"{KEY}-{PARENT[:-2]}  -8-{HEAD}.kv",
    ],
)
def test_other_names_are_not_ours(text: str) -> None:
    assert Name.parse(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "--8-.kv",
        "ab-cd-8-ef.kv",
        f"{KEY[:-2]}-{PARENT}-8-{HEAD}.kv",
        f"{KEY}ab-{PARENT}-8-{HEAD}.kv",
        f"{KEY}-{PARENT}ab-8-{HEAD}.kv",
        f"{KEY}-{PARENT}-8-{HEAD}ab.kv",
        f"{KEY}-{PARENT}-0-{HEAD}.kv",
    ],
)
def test_names_of_another_length_are_not_ours(text: str) -> None:
    assert Name.parse(text) is None


def test_a_name_never_raises() -> None:
    """Random edits of a good name are that name or another one that writes itself the same way."""
    generator = random.Random(1)
    good = f"{KEY}-{PARENT}-8-{HEAD}.side.kv"
    for _ in range(20_000):
        text = list(good)
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(len(text))
            text[at : at + generator.randint(0, 2)] = generator.choice(["", "-", ".", "0", "a", "F", "٣", " ", "\0", "g"])
        name = Name.parse("".join(text))
        assert name is None or str(name) == "".join(text)


def test_heads_depend_on_the_first_tokens_and_the_parent_alone() -> None:
    tokens = random.Random(2).randbytes(64 * TOKEN_NBYTES)
    parent, first = b"p" * 32, HEAD_TOKENS * TOKEN_NBYTES
    assert head_of(parent, tokens) == head_of(parent, tokens[:first]) == head_of(parent, tokens[:first] + b"other...")
    assert head_of(parent, tokens) != head_of(parent, tokens[: first - TOKEN_NBYTES])
    assert head_of(parent, tokens) != head_of(b"q" * 32, tokens)


# --- what is written ----------------------------------------------------------------------------------------------------


def test_checksums_cover_a_payload_in_chunks() -> None:
    payload = memoryview(random.Random(3).randbytes(2 * CHUNK_NBYTES + 5))
    assert [len(chunk) for chunk in chunks(payload)] == [CHUNK_NBYTES, CHUNK_NBYTES, 5]
    assert [num_chunks(nbytes) for nbytes in (0, 1, CHUNK_NBYTES, CHUNK_NBYTES + 1, len(payload))] == [0, 1, 1, 2, 3]
    digests = checksums(payload)
    assert len(set(digests)) == 3
    assert {len(digest) for digest in digests} == {16}


@pytest.mark.parametrize("kind", [MAIN, SIDE])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 48, 256, 400])
def test_a_header_comes_back(num_tokens: int, kind: str) -> None:
    spec, header, _ = sample(num_tokens, kind=kind)
    raw = encode_header(spec, header)
    assert parse_header(spec, raw) == header
    assert len(raw) == spec.header_nbytes
    assert len(raw) % ALIGNMENT == 0
    assert spec.file_nbytes == len(raw) + spec.payload_nbytes


def test_a_header_is_fixed() -> None:
    """What is on somebody's disk must be read by the next release, or FORMAT must change."""
    spec = Spec(b"i" * 32, b"n" * 16, b"p" * 32, MAIN, 4, Flat(16))
    header = Header(bytes(range(32)), 1_790_000_000_123, 0, checksums(memoryview(bytes(64))))
    raw = encode_header(spec, header)
    assert FORMAT == "tiered_cache/1"
    assert len(raw) == 4096
    assert hashlib.sha256(raw).hexdigest() == "58bcc08b2234fbd004545b108966c0049bacd5386254878c830eabd2ccdf316f"


def test_the_size_of_a_header_depends_on_the_spec_alone() -> None:
    """So a reader knows where the payload starts before it opens the file, and nothing in the file can move it."""
    spec, header, _ = sample()
    size = spec.header_nbytes
    generator = random.Random(4)
    for _ in range(200):
        other = Header(
            tokens=generator.randbytes(len(header.tokens)),
            created_ms=generator.randrange(10**15),
            ttl_ms=generator.choice([0, 1, generator.randrange(10**15)]),
            checksums=tuple(generator.randbytes(16) for _ in header.checksums),
        )
        raw = encode_header(replace(spec, parent=generator.randbytes(32), identity=generator.randbytes(32)), other)
        assert len(raw) == size


def test_the_safetensors_library_opens_a_file(tmp_path: Path) -> None:
    spec, header, payload = sample()
    path = tmp_path / "block.kv"
    path.write_bytes(encode_header(spec, header) + payload)
    tensors = safetensors.numpy.load_file(path)
    assert set(tensors) == {tensor.name for tensor in spec.layout.tensors(MAIN, 48)}
    for tensor in spec.layout.tensors(MAIN, 48):
        assert tensors[tensor.name].shape == tensor.shape
        assert tensors[tensor.name].tobytes() == payload[tensor.start : tensor.stop]

    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata()
    sha = metadata.pop("sha256")
    assert metadata == {
        "format": FORMAT,
        "identity": spec.identity.hex(),
        "namespace": spec.namespace.hex(),
        "kind": "main",
        "parent": spec.parent.hex(),
        "key": block_key(spec.parent, header.tokens).hex(),
        "num_tokens": "48",
        "created": "001790000000123",
        "ttl": "000000000060000",
        "chunk": str(CHUNK_NBYTES),
        "checksums": b"".join(header.checksums).hex(),
        "tokens": base64.b64encode(header.tokens).decode(),
    }
    raw = bytearray(path.read_bytes()[: spec.header_nbytes])
    raw[SHA] = b"0" * 64
    assert hashlib.sha256(raw).hexdigest() == sha


@pytest.mark.parametrize("num_tokens", [1, 48, 256, 1000])
def test_the_payload_is_aligned(num_tokens: int) -> None:
    spec, header, _ = sample(num_tokens)
    raw = encode_header(spec, header)
    start = 8 + int.from_bytes(raw[:8], "little")  # where safetensors says that tensors start
    assert start == spec.header_nbytes
    assert start % 4096 == 0


def test_a_header_is_small() -> None:
    """At most one percent of a block of a MiB or more."""
    shares = {}
    for heads, size, num_tokens in ((3, 64, 48), (3, 64, 256), (8, 128, 16), (8, 128, 256), (2, 64, 80)):
        spec = Spec(b"i" * 32, b"n" * 16, b"p" * 32, MAIN, num_tokens, Layers(30, heads, size))
        assert len(spec.layout.tensors(MAIN, num_tokens)) == 60
        assert spec.payload_nbytes >= 1 << 20
        shares[heads, size, num_tokens] = spec.header_nbytes / spec.payload_nbytes
    assert max(shares.values()) <= 0.01, shares


def test_time_is_over() -> None:
    header = Header(b"", 1_000_000, 5_000, ())
    assert [header.is_expired(now) for now in (1_000_000, 1_004_999, 1_005_000, 9_000_000)] == [False, False, True, True]
    assert [header.is_expired(now) for now in (940_000, 939_999)] == [False, True]  # a clock that went back
    assert not replace(header, ttl_ms=0).is_expired(10**14)


# --- hostile headers ----------------------------------------------------------------------------------------------------


def seal(raw: bytes) -> bytes:
    """Put the right SHA-256 over a header, as somebody would who knows this format."""
    if len(raw) < SHA.stop:
        return raw
    blank = raw[: SHA.start] + b"0" * 64 + raw[SHA.stop :]
    return raw[: SHA.start] + hashlib.sha256(blank).hexdigest().encode() + raw[SHA.stop :]


def fit(raw: bytes, size: int) -> bytes:
    """Make a header as long as it should be, with a length that says so."""
    raw = raw[:size].ljust(size)
    return (size - 8).to_bytes(8, "little") + raw[8:]


def edit_bytes(generator: random.Random, raw: bytes) -> bytes:
    edited = bytearray(raw)
    for _ in range(generator.choice([1, 1, 1, 2, 8, 64])):
        edited[generator.randrange(len(edited))] = generator.randrange(256)
    return bytes(edited)


def edit_text(generator: random.Random, raw: bytes) -> bytes:
    """Replace characters by such as JSON, hexadecimal, integers and base64 may take."""
    edited, end = bytearray(raw), len(raw.rstrip())
    for _ in range(generator.randint(1, 3)):
        edited[generator.randrange(8, end)] = generator.choice(b'0123456789abcdefABCDEFg{}[]":,\\ \t\n-+_=/.eE\0')
    return bytes(edited)


def flip_bit(generator: random.Random, raw: bytes) -> bytes:
    at = generator.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << generator.randrange(8)]) + raw[at + 1 :]


def insert(generator: random.Random, raw: bytes) -> bytes:
    at = generator.randrange(len(raw))
    return raw[:at] + generator.choice([generator.randbytes(generator.randint(1, 40)), b" ", b"0", b'"a":"b",']) + raw[at:]


def delete(generator: random.Random, raw: bytes) -> bytes:
    at = generator.randrange(len(raw))
    return raw[:at] + raw[at + generator.randint(1, 200) :]


def cut(generator: random.Random, raw: bytes) -> bytes:
    return raw[: generator.randrange(len(raw))]


def append(generator: random.Random, raw: bytes) -> bytes:
    return raw + generator.choice([b" ", b"\0", b"}", generator.randbytes(ALIGNMENT), b" " * ALIGNMENT])


def swap_fields(generator: random.Random, raw: bytes) -> bytes:
    """Exchange two fields, or their values only."""
    text = raw[8:].rstrip()
    start, stop = text.index(b'"sha256"'), text.index(b"}")
    fields = text[start:stop].split(b",")
    one, other = generator.sample(range(len(fields)), 2)
    if generator.random() < 0.5:
        fields[one], fields[other] = fields[other], fields[one]
    else:
        (name, value), (other_name, other_value) = fields[one].split(b":"), fields[other].split(b":")
        fields[one], fields[other] = name + b":" + other_value, other_name + b":" + value
    if generator.random() < 0.2:
        fields.append(generator.choice(fields))  # a field twice
    return raw[:8] + text[:start] + b",".join(fields) + text[stop:]


def swap_bytes(generator: random.Random, raw: bytes) -> bytes:
    size, end = generator.randint(1, 64), len(raw.rstrip())
    one, other = sorted(generator.sample(range(end - size), 2))
    edited = bytearray(raw)
    edited[one : one + size], edited[other : other + size] = raw[other : other + size], raw[one : one + size]
    return bytes(edited)


def huge_length(generator: random.Random, raw: bytes) -> bytes:
    length = generator.choice(
        [0, 1, len(raw), len(raw) - 7, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1, generator.getrandbits(64)]
    )
    return length.to_bytes(8, "little") + raw[8:]


def huge_numbers(generator: random.Random, raw: bytes) -> bytes:
    """Let the table speak of sizes and offsets that no memory has."""
    text = raw[8:].rstrip()
    start = text.index(b"},") + 2
    number = str(generator.choice([-1, 1 << 40, 1 << 63, 1 << 64, 10**300])).encode()
    digits = [at for at in range(start, len(text)) if text[at : at + 1].isdigit() and not text[at - 1 : at].isdigit()]
    at = generator.choice(digits)
    return raw[:8] + text[:at] + number + text[at + 1 :]


def nest(generator: random.Random, raw: bytes) -> bytes:
    depth = generator.randint(1, len(raw))
    opening, closing = generator.choice([(b"[", b"]"), (b'{"a":', b"}"), (b'{"__metadata__":', b"}")])
    return raw[:8] + opening * (depth // len(opening)) + closing * generator.choice([0, depth // len(opening)])


def other_sha(generator: random.Random, raw: bytes) -> bytes:
    digits = generator.randbytes(32).hex().encode()
    return raw[: SHA.start] + generator.choice([digits, b"0" * 64, b" " * 64, digits.upper()]) + raw[SHA.stop :]


def other_value(generator: random.Random, raw: bytes) -> bytes:
    """Put something into one of the fields that vary, with what its digits would take."""
    name = generator.choice([b"key", b"created", b"ttl", b"checksums", b"tokens"])
    start = raw.index(b'"' + name + b'":"') + len(name) + 4
    stop = raw.index(b'"', start)
    size = stop - start
    value = {
        b"created": generator.choice([b"-", b"+", b" ", b"_", b"0_", b"\xd9\xa8"]) + b"1" * size,
        b"ttl": generator.choice([b"-", b"+", b" ", b"1_", b"9"]) + b"1" * size,
        b"tokens": generator.choice([base64.b64encode(generator.randbytes(size * 3 // 4)), b"=" * size, b"A" * size]),
    }.get(name, generator.choice([generator.randbytes(size).hex().encode(), b" " * size, b"F" * size, b"ff " * size]))
    return raw[:start] + value[:size].ljust(size, b"0") + raw[stop:]


def of_other_tokens(generator: random.Random, raw: bytes) -> bytes:
    """Say it is another block, whose key fits: only the name of the file and its seeker can tell."""
    spec, header, _ = sample()
    tokens = generator.randbytes(len(header.tokens) + generator.choice([0, 0, -1, -2, 1, 2]))
    return encode_header(spec, replace(header, tokens=tokens, created_ms=generator.choice([5, -5]), ttl_ms=-7))


MUTATIONS: list[Callable[[random.Random, bytes], bytes]] = [
    edit_bytes, edit_text, flip_bit, insert, delete, cut, append, swap_fields, swap_bytes, huge_length, huge_numbers, nest,
    other_sha, other_value, of_other_tokens,
]  # fmt: skip


def check_hostile(spec: Spec, header: Header, raw: bytes, sealed: bool) -> bool:
    """Assert that a header is refused, or else says no more than is written down in it; return whether it was accepted.

    Who knows the format can write any header: a SHA-256 is no signature. Then what comes back must still be exactly what this
    package would have written for that spec. Nobody else gets anything accepted but the original.
    """
    try:
        found = parse_header(spec, raw)
    except CorruptEntryError:
        return False
    assert encode_header(spec, found) == raw
    assert len(found.tokens) == spec.num_tokens * TOKEN_NBYTES
    assert len(found.checksums) == num_chunks(spec.payload_nbytes)
    assert found.created_ms >= 0
    assert found.ttl_ms >= 0
    assert sealed or found == header
    return True


def attack(number: int) -> tuple[int, int]:
    """Try `number` headers; return how many of them were another than the original and accepted: unsealed, sealed."""
    spec, header, _ = sample()
    good = encode_header(spec, header)
    generator = random.Random(5)
    accepted = {False: 0, True: 0}
    for at in range(number):
        mutate = MUTATIONS[at % len(MUTATIONS)]
        raw = mutate(generator, good)
        if generator.random() < 0.5:
            raw = fit(raw, len(good))
        is_sealed = mutate is of_other_tokens or generator.random() < 0.5
        if is_sealed:
            raw = seal(raw)
        if raw != good:
            accepted[is_sealed] += check_hostile(spec, header, raw, is_sealed)
    return accepted[False], accepted[True]


@pytest.mark.parametrize("number", [MODERATE, MANY])
def test_hostile_headers(number: int) -> None:
    """A header is read as it was written, or it is a CorruptEntryError: never another exception, never other content."""
    unsealed, sealed = attack(number)
    assert unsealed == 0
    assert sealed > 0  # such as another time of creation: the attack reaches the fields behind the checksum


def test_without_the_comparison_hostile_headers_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""

    def parse_leniently(spec: Spec, raw: bytes) -> Header:
        try:
            return file_format._slice_header(spec, raw)
        except ValueError as error:
            raise CorruptEntryError from error

    monkeypatch.setattr("tests.disk.test_format.parse_header", parse_leniently)
    with pytest.raises(AssertionError):
        attack(500)


@pytest.mark.parametrize("field", ["tokens", "created", "ttl"])
def test_a_sealed_header_of_another_size_of_tokens_or_of_negative_times_is_refused(field: str) -> None:
    """Base64's padding leaves room for two bytes, and fixed digits for a sign."""
    spec, header, _ = sample(8)
    assert len(base64.b64encode(header.tokens + b"!!")) == len(base64.b64encode(header.tokens))
    hostile = {
        "tokens": replace(header, tokens=header.tokens + b"!!"),
        "created": replace(header, created_ms=-1),
        "ttl": replace(header, ttl_ms=-1),
    }[field]
    with pytest.raises(CorruptEntryError):
        parse_header(spec, encode_header(spec, hostile))


def test_every_other_spec_refuses_a_header() -> None:
    spec, header, _ = sample()
    raw = encode_header(spec, header)
    others = [
        replace(spec, identity=b"j" * 32),
        replace(spec, namespace=b"m" * 16),
        replace(spec, parent=b"q" * 32),
        replace(spec, kind=SIDE),
        replace(spec, num_tokens=47),
        replace(spec, num_tokens=49),
        replace(spec, num_tokens=1),
        replace(spec, num_tokens=4000),
        replace(spec, layout=Layers(num_heads=64, head_size=3)),
        replace(spec, layout=Layers(num_layers=31)),
        replace(spec, layout=Flat(1)),
    ]
    for other in others:
        with pytest.raises(CorruptEntryError):
            parse_header(other, raw)
    assert parse_header(spec, raw) == header


def test_hostile_headers_take_no_memory() -> None:
    """Nothing in a file decides how much is allocated."""
    spec, header, _ = sample()
    good = encode_header(spec, header)
    generator = random.Random(6)
    raws = [fit(mutate(generator, good), len(good)) for mutate in MUTATIONS for _ in range(20)]
    raws += [seal(raw) for raw in raws]
    assert parse_header(spec, good) == header  # what is remembered of a layout is there now
    peaks = []
    tracemalloc.start()
    try:
        for raw in raws:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            check_hostile(spec, header, raw, sealed=True)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert max(peaks) < 16 * len(good)


def test_no_json_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, header, _ = sample()
    raw = encode_header(spec, header)
    monkeypatch.setattr(json, "loads", None)
    monkeypatch.setattr(json, "JSONDecoder", None)
    assert parse_header(spec, raw) == header
