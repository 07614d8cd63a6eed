"""What a model's weights are, down to the last byte, and the cheap check at every call that they still are.

Owns finding all of them, reading them in full, and looking at each without that. Refuses to own what else K/V depend on
(identity), what a quantised tensor is made of (parts) and where weights are that were offloaded (offloaded).
"""

import hashlib
import io
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from tiered_cache.hf.offloaded import Offloaded, OnDisk
from tiered_cache.hf.parts import gather, gather_attributes, is_plain, keeps_more

_SAMPLES = 16  # elements of each tensor looked at in every call
_PATIENCE = 3  # calls in a row whose weights changed (a training loop), before nothing is looked for until they hold still

Weights = dict[str, torch.Tensor | OnDisk | str]  # by name: plain tensors, and texts of what quantised ones are besides
Facts = tuple[object, ...]  # about one of them: its name, two that change when it is written, then some of its values


@dataclass(slots=True)
class Reader:
    """Of one model: what was seen last, a digest of the weights then, and each one's own by name."""

    glance: tuple[Facts, ...] = ()
    digest: bytes = b""
    read: dict[object, tuple[Facts, bytes]] = field(default_factory=dict)
    changes: int = 0  # calls in a row that found weights rewritten

    def digest_of(self, weights: Weights, seen: tuple[Facts, ...]) -> bytes | None:
        """Return the digest of `weights`, of which `seen` was seen: read again are those that are not as they were.

        None while they change at every call.
        """
        still = seen == self.glance
        if not (still and self.digest) and not self._read_again(weights, seen, still):
            return None
        return self.digest

    def _read_again(self, weights: Weights, seen: tuple[Facts, ...], still: bool) -> bool:
        stale = [facts for facts in seen if self.read.get(facts[0], ((), b""))[0] != facts]
        rewritten = any(facts[0] in self.read for facts in stale)
        self.glance, self.digest = seen, b""
        self.changes = self.changes + 1 if rewritten and not still else 0
        if self.changes > _PATIENCE:
            return False
        for facts in stale:
            self.read[facts[0]] = facts, _checksum(str(facts[0]), weights[str(facts[0])])
        self.digest = b"".join(sorted(self.read[facts[0]][1] for facts in seen))
        return True


def find(modules: dict[str, torch.nn.Module], idle: set[str]) -> Weights:
    """Return all weights by name, but for rotary frequencies that follow the length of the request.

    Args:
        modules: those that compute, by name.
        idle: names of parameters that do not.

    Raises:
        UnreadableError: one of them cannot be read in full.
    """
    weights: Weights = {}
    offloaded = Offloaded(modules)
    is_any_offloaded = bool(offloaded)
    for prefix, module in modules.items():
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            path = f"{prefix}.{name}"
            if tensor is None or path in idle or (name.endswith("inv_freq") and _follows_length(module)):
                continue
            weight = offloaded.find(prefix, name, tensor) if is_any_offloaded else tensor
            if isinstance(weight, OnDisk) or is_plain(weight):
                weights[path] = weight
            else:
                weights |= gather(path, weight, module)
        cls: Any = type(module)
        if keeps_more(cls):
            weights |= gather_attributes(prefix, module)
    return weights


def glance(weights: Weights) -> tuple[Facts, ...]:
    """Return what is looked at in every call: where each tensor is, how often it was written, and some of its values.

    Of a file: what the file system says of it.
    """
    samples: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    with torch.no_grad():
        for tensor in weights.values():
            if isinstance(tensor, torch.Tensor):
                flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
                step = -(-flat.numel() // _SAMPLES) or 1
                samples.setdefault((tensor.dtype, tensor.device), []).append(_countable(flat[::step]))
        # All of a device's in one copy.
        streams = {group: io.BytesIO(_bytes_of(torch.cat(parts).cpu()).tobytes()) for group, parts in samples.items()}
    facts: list[Facts] = []
    for name, tensor in weights.items():
        if isinstance(tensor, torch.Tensor):
            count = -(-tensor.numel() // (-(-tensor.numel() // _SAMPLES) or 1))
            sample = streams[tensor.dtype, tensor.device].read(count * tensor.itemsize)
            facts.append((*_written(name, tensor), tensor.shape, tensor.dtype, sample))
        else:
            facts.append(_written(name, tensor))
    return tuple(facts)


def is_unwritten(weights: Weights, since: tuple[Facts, ...]) -> bool:
    """Say whether nothing was written since a glance, not even there and back. Looks at less: version counters."""
    written = [_written(name, weight) for name, weight in weights.items()]
    if any(version is None for _, _, version in written):
        return glance(weights) == since  # no version counters: look at samples
    return written == [facts[:3] for facts in since]


def _written(name: str, weight: torch.Tensor | OnDisk | str) -> tuple[str, object, object]:
    """Return a weight's name, where it is, and what changes when it is written: None of tensors without version counters."""
    if isinstance(weight, torch.Tensor):
        return name, weight.data_ptr(), None if weight.is_inference() else weight._version
    if isinstance(weight, OnDisk):
        return name, weight.path, weight.facts()
    return name, weight, ""


def _follows_length(module: torch.nn.Module) -> bool:
    return any(kind in str(getattr(module, "rope_type", "")) for kind in ("dynamic", "longrope"))


def _checksum(name: str, weight: torch.Tensor | OnDisk | str) -> bytes:
    """Return a digest of every byte of a tensor, with its name, dtype and shape."""
    if isinstance(weight, str):
        return hashlib.sha256(f"{name}|{weight}".encode()).digest()
    tensor = weight.load() if isinstance(weight, OnDisk) else weight  # of files one at a time is in memory
    digest = hashlib.sha256(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|{tensor.device.type}|".encode())
    data = tensor.detach().contiguous()
    digest.update(xxhash.xxh3_128_digest(_bytes_of(data)) if data.device.type == "cpu" else _device_sum(data))
    return digest.digest()


def _countable(flat: torch.Tensor) -> torch.Tensor:
    """Return elements of one byte as such: not every dtype of theirs can be put together."""
    return flat.view(torch.uint8) if flat.itemsize == 1 else flat


def _bytes_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of a contiguous CPU tensor as a numpy array that shares its memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _device_sum(tensor: torch.Tensor) -> bytes:
    """Return a checksum of all bytes made where they are: two sums modulo 2^64, each with weights of the position."""
    raw = tensor.reshape(-1).view(torch.uint8)
    if raw.numel() % 8:
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8))
    raw = raw.view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=raw.device)
    chunk = 1 << 24  # bounds the extra memory
    for start in range(0, raw.numel(), chunk):
        part = raw[start : start + chunk]
        place = torch.arange(start, start + part.numel(), device=raw.device)
        sums[0] += (part * (2 * place + 1)).sum()
        # Odd multipliers keep every bit; mixing the high half down makes it count in the sum as well.
        mixed = (part ^ (part >> 29)) * -4658895280553007687 + place
        sums[1] += ((mixed ^ (mixed >> 32)) * -7723592293110705685).sum()
    return sums.cpu().numpy().tobytes()
