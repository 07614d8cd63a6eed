"""The disk tier under generate() when something is wrong with the disk, lives long or short, or is used by several."""

import contextlib
import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

import tiered_cache
from tests.hf.harness import assert_consistent, assert_same, run
from tests.hf.models import fresh, prompt, tiny
from tests.hf.test_disk import LENGTH, Disk, check, left_padded, parted
from tests.hf.test_disk import disk as disk
from tiered_cache import ConfigError, MissReason, TieredCache, TierStack, defaults, forget, warm
from tiered_cache.hf import compat
from tiered_cache.keys import SIDE
from tiered_cache.tiers.disk import calls
from tiered_cache.writeback import Write

# --- damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [-1, 4096, 300, 3, 70])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_block(place: int, at: int, disk: Disk) -> None:
    """In payload, header, or their sizes: the prefix ends before it, and the call writes it anew."""
    check(tiny(), prompt(LENGTH), disk.open(), 0)
    stack = disk.restart()
    disk.damage(place, at=at)
    check(tiny(), prompt(LENGTH), stack, 16 * place, reason=MissReason.CORRUPT)
    assert stack.stats().tiers["disk"].corrupt_pieces == 1
    check(tiny(), prompt(LENGTH), stack, LENGTH - 1, {"host": LENGTH - 1})
    check(tiny(), prompt(LENGTH), disk.restart(), 48)


@pytest.mark.parametrize(
    ("place", "cached", "reason"), [(0, 48, MissReason.NOT_STORED), (1, 16, MissReason.CORRUPT), (2, 32, MissReason.CORRUPT)]
)
def test_a_damaged_side_piece(place: int, cached: int, reason: MissReason, disk: Disk) -> None:
    """It matters where it is in the last window of a hit; then a shorter one is used, and the call writes it anew."""
    model = tiny("Gemma2")
    check(model, prompt(LENGTH), disk.open(), 0)
    stack = disk.restart()
    disk.damage(place, SIDE)
    check(model, prompt(LENGTH), stack, cached, reason=reason)
    check(model, prompt(LENGTH), stack, LENGTH - 1, {"host": LENGTH - 1})
    check(model, prompt(LENGTH), disk.restart(), 48)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Mistral"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_block_deleted_behind_its_back(name: str, place: int, disk: Disk) -> None:
    check(tiny(name), prompt(LENGTH), disk.open(), 0)
    stack = disk.restart()
    check(tiny(name), parted(15), stack, 0)  # its folders are known
    stack._inventory.discard_roots(lambda root: True)
    disk.file(place).unlink()
    check(tiny(name), prompt(LENGTH), stack, 16 * place)
    check(tiny(name), prompt(LENGTH), disk.restart(), 48)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_rows_of_which_one_is_damaged(name: str, options: dict[str, Any], disk: Disk) -> None:
    """Two share a damaged block, one has blocks of its own; wherever it is, all end there."""
    model = tiny(name)
    ids, mask = left_padded(prompt(70), torch.cat([prompt(32), prompt(38, seed=1)], dim=1), prompt(60, seed=2))
    cold = run(model, ids, attention_mask=mask, **options)
    for number in range(0, 14, 3):
        stack = disk.restart()
        stack.clear()
        run(model, ids, past_key_values=TieredCache(stack), attention_mask=mask)
        stack = disk.restart()
        files = sorted(disk.path.rglob("*.kv"))
        file = files[number % len(files)]
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
        cache = TieredCache(stack)
        assert_same(run(model, ids, past_key_values=cache, attention_mask=mask, **options), cold)
        stack.flush(60)
        assert_consistent(stack)


def test_the_directory_is_deleted_between_calls(disk: Disk) -> None:
    stack = disk.open()
    check(tiny(), prompt(LENGTH), stack, 0)
    shutil.rmtree(disk.path)
    stack._inventory.discard_roots(lambda root: True)
    check(tiny(), prompt(LENGTH), stack, 0)
    check(tiny(), prompt(LENGTH), disk.restart(), 48)


class Meanwhile:
    """A stopping criterion that does something once, in the middle of a call."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        what, self.what = self.what, lambda: None
        what()
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_in_the_middle_of_a_call(name: str, disk: Disk) -> None:
    """The directory deleted, all cleared, the model forgotten, another call, Ctrl-C: no wrong token, now or later."""
    model = tiny(name)
    check(model, prompt(LENGTH), disk.open(), 0)
    cold = run(model, prompt(LENGTH), new_tokens=5)

    def ctrl_c(stack: TierStack) -> None:
        raise KeyboardInterrupt

    def delete(stack: TierStack) -> None:
        shutil.rmtree(disk.path)

    def call(stack: TierStack) -> None:
        run(model, parted(40), past_key_values=TieredCache(stack))

    for what in (delete, TierStack.clear, lambda stack: forget(model, stack=stack), call, ctrl_c):
        stack = disk.restart()
        cache = TieredCache(stack)
        with contextlib.suppress(KeyboardInterrupt):
            criterion = Meanwhile(functools.partial(what, stack))
            assert_same(run(model, prompt(LENGTH), past_key_values=cache, stopping_criteria=[criterion]), cold)
            assert what is not ctrl_c
        stack.flush(60)
        assert_consistent(stack)
        check(model, prompt(LENGTH), stack, LENGTH - 1, {"resident": LENGTH - 1}, cache=cache)
        check(model, prompt(LENGTH), disk.restart(), 48 if what is not ctrl_c else LENGTH - 1)


def test_a_directory_that_is_read_only(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is used, though nothing can be added, touched or removed."""
    check(tiny(), prompt(LENGTH), disk.open(), 0)
    disk.close()

    def refuse(*args: Any) -> Any:
        raise OSError(30, "Read-only file system")

    def refuse_new(path: str) -> None:
        raise OSError(17 if Path(path).exists() else 30, "File exists, or read-only file system")

    monkeypatch.setattr(calls, "make_folder", refuse_new)
    for name in ("open_nameless", "open_new", "link", "rename", "unlink", "set_mode", "set_used", "set_used_open"):
        monkeypatch.setattr(calls, name, refuse)
    stack = disk.restart()
    disk.damage(2)
    check(tiny(), prompt(LENGTH), stack, 32, reason=MissReason.CORRUPT)
    check(tiny(), parted(50), stack, 50, {"host": 50})
    assert stack.stats().dropped_blocks > 0
    assert stack.stats().tiers["disk"].failures > 0
    check(tiny(), prompt(LENGTH), disk.restart(), 32, reason=MissReason.CORRUPT)  # found again, and bad again
    monkeypatch.undo()


def test_a_wrong_expectation_of_the_layout_finds_nothing(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiered_cache.hf import binding

    right = binding.expected_layouts
    check(tiny(), prompt(LENGTH), disk.open(), 0)
    other = right(tiny("Qwen3"), TieredCache(disk.open()).layers) + right(tiny("Gemma2"), [])
    for expected, cached in ((lambda *_: other, 0), (lambda *args: [*other, *right(*args)], 48), (lambda *_: [], 0)):
        monkeypatch.setattr(binding, "expected_layouts", expected)
        check(tiny(), prompt(LENGTH), disk.restart(), cached)


# --- how long things stay -------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Add the one number in it to the time of day."""
    ahead, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    return ahead


@pytest.mark.parametrize("warmed", [False, True])
def test_ttl(warmed: bool, clock: list[float], disk: Disk) -> None:
    """Its time over, neither memory nor the disk answers with it, and its files go."""
    stack = disk.open()
    if warmed:
        warm(tiny(), prompt(LENGTH), stack=stack, ttl=100)
    else:
        check(tiny(), prompt(LENGTH), stack, 0, cache=TieredCache(stack, ttl=100))
    clock[0] = 90.0
    stack = disk.restart()
    cache = TieredCache(stack)
    assert cache.restore(tiny(), prompt(LENGTH)) >= 48
    clock[0] = 101.0
    stack.close()
    stack = disk.restart()
    check(tiny(), prompt(LENGTH), stack, 0, cache=TieredCache(stack, ttl=50))
    check(tiny(), prompt(LENGTH), stack, LENGTH - 1, {"host": LENGTH - 1}, cache=TieredCache(stack, ttl=50))
    clock[0] = 160.0
    check(tiny(), prompt(LENGTH), stack, 0, cache=TieredCache(stack, ttl=1))
    disk.close()
    clock[0] = 10_000.0
    stack = disk.open()
    stack.disk.tidy()
    assert not list(disk.path.rglob("*.kv"))


def test_a_longer_stay_wins(clock: list[float], disk: Disk) -> None:
    stack = disk.open()
    check(tiny(), prompt(LENGTH), stack, 0, cache=TieredCache(stack, ttl=100))
    stack = disk.restart()
    check(tiny(), prompt(LENGTH), stack, 48)
    clock[0] = 200.0
    check(tiny(), prompt(LENGTH), stack, LENGTH - 1, {"host": LENGTH - 1})
    check(tiny(), prompt(LENGTH), disk.restart(), 48)


@pytest.mark.parametrize("options", [{"ttl": value} for value in (0, -1, float("nan"), float("inf"), True, "5")])
def test_bad_ttl(options: dict[str, Any], disk: Disk) -> None:
    with pytest.raises(ConfigError, match=r"TieredCache\(ttl="):
        TieredCache(disk.open(), **options)
    with pytest.raises(ConfigError, match=r"warm\(ttl="):
        warm(tiny(), prompt(5), stack=disk.open(), **options)


@pytest.mark.parametrize("pin", [1, "yes", None, 0.0])
def test_bad_pin(pin: Any, disk: Disk) -> None:
    with pytest.raises(ConfigError, match=r"TieredCache\(pin="):
        TieredCache(disk.open(), pin=pin)
    with pytest.raises(ConfigError, match=r"warm\(pin="):
        warm(tiny(), prompt(5), stack=disk.open(), pin=pin)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_a_pin_survives_pressure(name: str, disk: Disk) -> None:
    """In memory and on disk, and by the next process too; so does what was pinned when it was there already."""
    model, size = tiny(name), 500_000
    warm(model, prompt(48), stack=disk.open(size=size), pin=True)
    later = prompt(48, seed=99)
    warm(model, later, stack=disk.stacks[0])
    warm(model, later, stack=disk.restart(size=size), pin=True)
    for _ in range(2):
        stack = disk.restart(60_000, size)
        for seed in range(1, 13):
            run(model, prompt(96, seed=seed), past_key_values=TieredCache(stack))
            stack.flush(60)
    assert disk.restart(60_000, size).stats().tiers["disk"].used_bytes <= size
    for ids in (prompt(48), later):
        check(model, ids, disk.restart(size=size), 47)
    assert sum(file.stat().st_blocks * 512 for file in disk.path.rglob("*")) <= size


def test_pins_have_a_cap(disk: Disk) -> None:
    """Half of a tier; beyond, a pin is as nothing, and nothing else fails."""
    stack = disk.open(60_000, 500_000)
    for seed in range(12):
        warm(tiny(), prompt(96, seed=seed), stack=stack, pin=True)
    assert stack._inventory._pinned_bytes <= 30_000
    stats = disk.restart(60_000, 500_000).stats()
    pins = {file.name[:-4] for file in disk.path.rglob("*.pin")}
    assert pins
    assert sum(file.stat().st_blocks * 512 for key, file in disk.files().items() if key.hex() in pins) <= 250_000
    check(tiny(), prompt(96, seed=50), disk.restart(60_000, 500_000), 0)
    check(tiny(), prompt(96, seed=50), disk.restart(60_000, 500_000), 95)
    assert stats.tiers["disk"].used_bytes <= 500_000


# --- the environment ------------------------------------------------------------------------------------------------------


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin, and end, without a default stack."""
    monkeypatch.setattr(defaults, "_default", None)
    for name in ("TIERED_CACHE_DIR", "TIERED_CACHE_DISK_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    if defaults._default is not None:
        defaults._default.close()


def test_a_default_stack_with_a_disk(default: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiered_cache.default_stack().disk is None
    tiered_cache.default_stack().close()
    monkeypatch.setenv("TIERED_CACHE_DIR", str(tmp_path / "a" / "kv"))
    free = shutil.disk_usage(tmp_path).free
    assert 0 < tiered_cache.default_stack().disk.capacity_bytes <= min(free // 4 + (1 << 30), 64 << 30)
    for cached in (0, 299):
        cache = TieredCache()
        run(tiny(), prompt(300), past_key_values=cache)
        assert cache.usage.cached_by_tier == ({"disk": cached} if cached else {})
        cache.stack.close()
    monkeypatch.setenv("TIERED_CACHE_DISK_SIZE", "3GiB")
    assert tiered_cache.default_stack().disk.capacity_bytes == 3 << 30


@pytest.mark.parametrize(
    ("directory", "size"), [("/proc/nowhere", None), ("", None), (None, "many"), (None, "-1"), (None, "0"), ("file", None)]
)
def test_a_bad_environment(
    default: None, directory: str | None, size: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clear error where a stack is asked for; generate() under enable() goes on without."""
    (tmp_path / "file").write_text("mine")
    path = {"file": str(tmp_path / "file"), None: str(tmp_path / "kv")}.get(directory, directory)
    monkeypatch.setenv("TIERED_CACHE_DIR", path)
    if size is not None:
        monkeypatch.setenv("TIERED_CACHE_DISK_SIZE", size)
    if directory == "":  # as good as none
        assert tiered_cache.default_stack().disk is None
        return
    with pytest.raises(ConfigError, match="TIERED_CACHE_DIR") as caught:
        TieredCache()
    assert "TIERED_CACHE_DISK_SIZE" in str(caught.value)
    cold = run(tiny(), prompt(LENGTH))
    tiered_cache.enable()
    try:
        assert_same(run(tiny(), prompt(LENGTH)), cold)
    finally:
        tiered_cache.disable()


PROGRAM = """
import json, sys, torch
from transformers import AutoModelForCausalLM
from tiered_cache import TieredCache
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.tensor(json.loads(sys.argv[2]))
cache = TieredCache()
options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
print(json.dumps([out.tolist(), cache.usage.cached_by_tier, cache.usage.prompt_tokens]))
"""


def test_processes_one_after_the_other(tmp_path: Path) -> None:
    """Each ends without a flush; the next finds what it left, if its model is the same, wherever it was loaded from."""
    model, ids = fresh(), prompt(300)
    model.save_pretrained(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "elsewhere")
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[1, 1] += 0.01
    model.save_pretrained(tmp_path / "edited")
    cold = fresh().generate(ids, max_new_tokens=5, do_sample=False).tolist()
    environment = {
        **os.environ,
        "TIERED_CACHE_DIR": str(tmp_path / "kv"),
        "TIERED_CACHE_DISK_SIZE": "100MB",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
    }
    for name, cached in (("model", 0), ("elsewhere", 299), ("edited", 0)):
        arguments = [sys.executable, "-c", PROGRAM, str(tmp_path / name), json.dumps(ids.tolist())]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert not any(word in done.stderr for word in ("tiered_cache", "Traceback")), (
            done.stderr
        )  # torchao says much by itself
        tokens, by_tier, prompt_tokens = json.loads(done.stdout)
        assert (tokens == cold) or name == "edited"
        assert by_tier == ({"disk": cached} if cached else {})
        assert prompt_tokens == 300


def test_the_writer_lets_go_of_the_bytes_before_it_says_so(disk: Disk) -> None:
    """A thread that frees a tensor while the interpreter ends aborts the process, so it must not be the last to hold one."""
    stack = disk.open()
    queue = stack._archive.writes
    changed = queue._changed

    class SlowToReturn:
        """Keeps the writing thread for a while where it has just told others that it is done."""

        def __getattr__(self, name: str) -> Any:
            return getattr(changed, name)

        def __enter__(self) -> Any:
            return changed.__enter__()

        def __exit__(self, *args: Any) -> None:
            changed.__exit__(*args)
            if threading.current_thread() is queue._thread and not queue._writes:
                time.sleep(0.3)

    run(tiny(), prompt(LENGTH), past_key_values=TieredCache(stack))
    stack.flush(60)
    queue._changed = SlowToReturn()
    run(tiny(), prompt(LENGTH, seed=1), past_key_values=TieredCache(stack))
    stack.flush(60)
    assert not [found for found in gc.get_objects() if type(found) is Write]


# --- clear and forget -----------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    write = calls.write

    def slow(*args: Any) -> int:
        time.sleep(0.02)
        return write(*args)

    monkeypatch.setattr(calls, "write", slow)


def test_clear_means_every_tier(slow_writes: None, disk: Disk) -> None:
    """What is queued as well: nothing is found afterwards, and nothing lies there."""
    stack = disk.open()
    for seed in range(3):
        run(tiny(), prompt(LENGTH, seed=seed), past_key_values=TieredCache(stack))
    stack.clear()
    assert not list(disk.path.rglob("*.kv"))
    check(tiny(), prompt(LENGTH), stack, 0)
    stack.clear()
    stack = disk.restart()
    assert not list(disk.path.rglob("*.kv"))
    check(tiny(), prompt(LENGTH), stack, 0)


def test_forget_means_every_tier(slow_writes: None, disk: Disk) -> None:
    stack, other = disk.open(), tiny(seed=1)
    for model in (tiny(), other):
        for seed in range(3):
            run(model, prompt(LENGTH, seed=seed), past_key_values=TieredCache(stack, salt=str(seed)))
    forget(tiny(), stack=stack)
    check(tiny(), prompt(LENGTH), disk.restart(), 0, cache=TieredCache(disk.stacks[0], salt="0"))
    check(other, prompt(LENGTH), disk.restart(), 48, cache=TieredCache(disk.stacks[0], salt="0"))


def test_clear_a_namespace(disk: Disk) -> None:
    for namespace in ("default", "other"):
        stack = disk.open(namespace=namespace)
        check(tiny(), prompt(LENGTH), stack, 0)
    stack = disk.restart()
    stack.clear(namespace="other")
    check(tiny(), prompt(LENGTH), disk.restart(), 48)
    check(tiny(), prompt(LENGTH), disk.restart(namespace="other"), 0)
    disk.restart().clear(namespace="default")
    check(tiny(), prompt(LENGTH), disk.restart(namespace="other"), 48)
    check(tiny(), prompt(LENGTH), disk.restart(), 0)


# --- several at once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
@pytest.mark.parametrize("num_stacks", [1, 2])
def test_threads(name: str, num_stacks: int, disk: Disk) -> None:
    """Four of them, with memory for a few blocks, on one stack or on two that share a directory."""
    model = tiny(name)
    stacks = [disk.open(40_000, 800_000) for _ in range(num_stacks)]
    prompts = [torch.cat([prompt(20 + 7 * number), prompt(30, seed=number)], dim=1) for number in range(6)]
    cold = [model.generate(ids, max_new_tokens=4, do_sample=False).tolist() for ids in prompts]
    wrong: list[Any] = []

    def work(thread: int) -> None:
        try:
            for step in range(9):
                number = (thread + step * (thread + 1)) % len(prompts)
                cache = TieredCache(stacks[(thread + step) % num_stacks])
                out = model.generate(prompts[number], max_new_tokens=4, do_sample=False, past_key_values=cache)
                if out.tolist() != cold[number]:
                    wrong.append((thread, step, cache.usage))
        except Exception as error:  # noqa: BLE001  it is looked at below
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for stack in stacks:
        stack.flush(60)
        assert_consistent(stack)
        assert stack.stats().tiers["disk"].corrupt_pieces == 0
        assert stack.stats().tiers["disk"].failures == 0


def test_another_stack_on_the_directory_is_seen(disk: Disk) -> None:
    """What one writes while both are open the other finds, and what one removes it misses."""
    first, second = disk.open(), disk.open()
    check(tiny(), prompt(LENGTH), second, 0)
    check(tiny(), prompt(LENGTH, seed=1), first, 0)
    check(tiny(), prompt(LENGTH, seed=1), second, 48)
    check(tiny(), prompt(LENGTH), first, 48)
    first.clear()
    second._inventory.discard_roots(lambda root: True)
    check(tiny(), prompt(LENGTH), second, 0)
    check(tiny(), prompt(LENGTH), first, 48)


# --- what is seen ---------------------------------------------------------------------------------------------------------


def test_progress_bars(
    slow_writes: None, disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where something takes long, and never where transformers' bars are off."""
    for delay, is_on, expected in ((60.0, True, False), (0.0, False, False), (0.0, True, True)):
        monkeypatch.setattr(compat, "BAR_DELAY_S", delay)
        (transformers_logging.enable_progress_bar if is_on else transformers_logging.disable_progress_bar)()
        try:
            stack = disk.restart()
            stack.clear()
            capsys.readouterr()
            run(tiny(), prompt(LENGTH), past_key_values=TieredCache(stack))
            assert stack.flush(60)
            assert ("Saving" in capsys.readouterr().err) == expected
            stack = disk.restart()
            capsys.readouterr()
            run(tiny(), prompt(LENGTH), past_key_values=TieredCache(stack))
            seen = capsys.readouterr()
            assert ("Loading" in seen.err) == expected
            assert not seen.out
        finally:
            transformers_logging.enable_progress_bar()


def test_little_is_said_where_a_disk_fails(
    disk: Disk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line a minute, and the reason in explain(); tokens are right."""
    check(tiny(), prompt(LENGTH), disk.open(), 0)
    stack = disk.restart()

    def fail(*args: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(calls, "read", fail)
    cache = TieredCache(stack)
    check(tiny(), prompt(LENGTH), stack, 0, cache=cache, reason=MissReason.TIER_ERROR)
    assert "TIER_ERROR: the disk tier failed" in cache.explain()
    check(tiny(), parted(40), stack, 40, {"host": 40})
    assert len([record for record in caplog.records if record.name.startswith("tiered_cache")]) == 1
    monkeypatch.undo()


def test_explain_where_a_block_is_gone(disk: Disk) -> None:
    """No word of sliding windows where a model has none."""
    check(tiny(), prompt(LENGTH), disk.open(), 0)
    stack = disk.restart()
    check(tiny(), parted(15), stack, 0)
    stack._inventory.discard_roots(lambda root: True)
    disk.file(1).unlink()
    cache = TieredCache(stack)
    check(tiny(), prompt(LENGTH), stack, 16, cache=cache)
    assert "sliding" not in cache.explain()
