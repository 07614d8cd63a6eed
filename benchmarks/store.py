"""The disk tier by itself, against the same bytes read and written raw: same call sizes, same threads. No torch in the way.

    python -m benchmarks.store [--smoke] [--rounds 21] [--output benchmarks/results/store.json]

read, cached / dropped   `DiskTier.read` with its checks into buffers that are used again, over preadv of the same files,
                         from the page cache, and after the files were dropped from it (posix_fadvise)
write                    `DiskTier.ensure`, over write() of the same bytes to new files
open                     a directory of 100,000 entries: opening it, the first lookup, looking all of it over; memory per entry
"""

import os
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pairs import arguments, measure, ratio, show, summary, write
from tiered_cache.format import TensorSpec
from tiered_cache.keys import MAIN, block_key, encode_tokens
from tiered_cache.tiers.disk import Branch, DiskTier, Stay, StoredBlock
from tiered_cache.tiers.disk.files import TRANSFER_NBYTES

BLOCK_TOKENS = 256
ROOT = bytes(32)
THREADS = 2


@dataclass(frozen=True)
class Model:
    """Blocks of `layers` layers with 3 heads of 64 in fp32, as SmolLM2's are (30 layers: 11.8 MB)."""

    layers: int = 30

    def nbytes(self, kind: str, num_tokens: int) -> int:
        return self.layers * 2 * 3 * 64 * 4 * num_tokens

    def tensors(self, kind: str, num_tokens: int) -> list[TensorSpec]:
        each = 3 * 64 * 4 * num_tokens
        return [
            TensorSpec(
                f"{place // 2}.{('keys', 'values')[place % 2]}", "F32", (3, num_tokens, 64), place * each, (place + 1) * each
            )
            for place in range(2 * self.layers)
        ]


def in_threads(work: Callable[[int], None]) -> float:
    """Return the seconds that THREADS threads take for `work(thread)` each."""
    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def drop(files: list[Path]) -> None:
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def throughput(folder: str, layers: int, count: int, rounds: int) -> dict[str, Any]:
    """Read and write `count` blocks, ours and raw."""
    layout = Model(layers)
    branch = Branch(b"benchmark", "default", layout, 0)
    nbytes = layout.nbytes(MAIN, BLOCK_TOKENS)
    tier = DiskTier(f"{folder}/kv", "64GiB", min_free=0)
    payload = memoryview(np.random.default_rng(0).bytes(nbytes))
    blocks, parent = [], ROOT
    for number in range(count):
        tokens = encode_tokens(np.arange(BLOCK_TOKENS) + number)
        tier.ensure(branch, parent, MAIN, tokens, payload, Stay(), {})
        blocks.append(StoredBlock(block_key(parent, tokens), parent, tokens, BLOCK_TOKENS, False))
        parent = blocks[-1].key
    files = sorted(Path(folder, "kv").rglob("*.kv"))
    on_disk = sum(file.stat().st_blocks * 512 for file in files) / (nbytes * count)
    buffers = [memoryview(bytearray(nbytes)) for _ in range(THREADS)]

    def read_ours(thread: int) -> None:
        for block in blocks[thread::THREADS]:
            tier.read(branch, block, MAIN, buffers[thread])

    def read_raw(thread: int) -> None:
        for file in files[thread::THREADS]:
            fd = os.open(file, os.O_RDONLY)
            start = os.fstat(fd).st_size - nbytes
            for place in range(0, nbytes, TRANSFER_NBYTES):
                os.preadv(fd, [buffers[thread][place : place + TRANSFER_NBYTES]], start + place)
            os.close(fd)

    def timed(work: Callable[[int], None], dropped: bool) -> Callable[[int], float]:
        def run(round_: int) -> float:
            if dropped:
                drop(files)
            return in_threads(work)

        return run

    def write_ours(round_: int) -> float:
        fresh = DiskTier(f"{folder}/written", "64GiB", min_free=0)
        started, parent = time.perf_counter(), ROOT
        for block in blocks:
            fresh.ensure(branch, parent, MAIN, block.tokens, payload, Stay(), {})
            parent = block.key
        seconds = time.perf_counter() - started
        fresh.clear()
        return seconds

    def write_raw(round_: int) -> float:
        started = time.perf_counter()
        for number in range(count):
            fd = os.open(f"{folder}/raw-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for place in range(0, nbytes, TRANSFER_NBYTES):
                os.write(fd, payload[place : place + TRANSFER_NBYTES])
            os.close(fd)
        seconds = time.perf_counter() - started
        for number in range(count):
            Path(f"{folder}/raw-{number}").unlink()
        return seconds

    drop(files)
    seconds = measure(
        {
            "read cached, ours": timed(read_ours, False), "read cached, raw": timed(read_raw, False),
            "read dropped, ours": timed(read_ours, True), "read dropped, raw": timed(read_raw, True),
            "write, ours": write_ours, "write, raw": write_raw,
        },
        rounds,
    )  # fmt: skip
    total = nbytes * count / 1e9
    return {
        "bytes on disk / K/V bytes": on_disk,
        "GB/s": {name: summary([total / value for value in values]) for name, values in seconds.items()},
        **{  # the share of raw speed: raw seconds over ours
            what: ratio(seconds, f"{what}, raw", f"{what}, ours") for what in ("read cached", "read dropped", "write")
        },
        "raw": seconds,
    }


def opening(folder: str, count: int, rounds: int) -> dict[str, Any]:
    """Open a directory of `count` entries, look something up, and look all of it over."""
    layout = Model(1)
    branch = Branch(b"many", "default", layout, 0)
    path = f"{folder}/many"
    tier = DiskTier(path, "64GiB", min_free=0)
    template: bytes | None = None
    parent = ROOT
    prompt = []
    for number in range(count):
        tokens = encode_tokens(np.arange(BLOCK_TOKENS) + number)
        if number < 64 or template is None:
            tier.ensure(branch, parent, MAIN, tokens, memoryview(bytes(layout.nbytes(MAIN, BLOCK_TOKENS))), Stay(), {})
            prompt.append(tokens)
            parent = block_key(parent, tokens)
            template = b""
        else:  # a name is all that is looked at
            key = block_key(parent, tokens)
            shard = Path(path, branch.folder.hex(), branch.namespace_digest.hex(), key[:1].hex())
            shard.mkdir(mode=0o700, exist_ok=True)
            (shard / f"{block_key(key, tokens)[:16].hex()}-{key[:16].hex()}-{BLOCK_TOKENS}-{key[:4].hex()}.kv").touch(
                mode=0o600
            )
    wanted = b"".join(prompt)

    def open_and_find(round_: int) -> float:
        started = time.perf_counter()
        found = DiskTier(path, "64GiB", min_free=0).extend(branch, ROOT, wanted, BLOCK_TOKENS)
        assert len(found) == len(prompt)
        return time.perf_counter() - started

    opened = DiskTier(path, "64GiB", min_free=0)
    opened.tidy()

    def find_again(round_: int) -> float:
        started = time.perf_counter()
        opened.extend(branch, ROOT, wanted, BLOCK_TOKENS)
        return time.perf_counter() - started

    def look_over(round_: int) -> float:
        fresh = DiskTier(path, "64GiB", min_free=0)
        started = time.perf_counter()
        fresh.tidy()
        assert fresh.num_pieces == count
        return time.perf_counter() - started

    seconds = measure({"open and find": open_and_find, "find again": find_again, "look over": look_over}, rounds)
    tracemalloc.start()
    measured = DiskTier(path, "64GiB", min_free=0)
    measured.tidy()
    memory = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    return {
        "entries": count,
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "bytes of memory an entry": memory,
        "raw": seconds,
    }


def main() -> None:
    options = arguments(__doc__, "store.json")
    layers, blocks, entries = (1, 4, 2_000) if options.smoke else (30, 16, 100_000)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # not in memory, as /tmp may be
        speed = throughput(folder, layers, blocks, options.rounds)
        print("| what | GB/s | share of raw |\n|---|---|---|")
        for what in ("read cached", "read dropped", "write"):
            print(f"| {what} | {speed['GB/s'][f'{what}, ours']['median']:.2f} | {show(speed[what])} |")
        print(f"| bytes on disk over K/V bytes | | {speed['bytes on disk / K/V bytes']:.4f} |")
        many = opening(folder, entries, min(options.rounds, 5))
        for name, value in many["seconds"].items():
            print(f"| {entries:,} entries: {name} | {value['median'] * 1e3:.1f} ms | |")
        print(f"| memory an entry | {many['bytes of memory an entry']:.0f} bytes | |")
    write(options.output, {"throughput": speed, "opening": many})


if __name__ == "__main__":
    main()
