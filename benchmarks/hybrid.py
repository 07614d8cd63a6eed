"""A six-turn chat on models with recurrent layers: tokens computed, time to first token, bytes of snapshots.

    python -m benchmarks.hybrid [--smoke] [--rounds 7] [--output benchmarks/results/hybrid.json]

Two models with random weights, built like Qwen3-Next (linear attention and full attention, 3 : 1, experts) and like LFM2 (short
convolutions and full attention). In every turn, as a chat server gets it: the whole conversation so far.

ours       a new TieredCache in every turn, on one stack
scratch    a new DynamicCache in every turn: what transformers does
carried    one DynamicCache carried along by hand, which computes each token once: what attention alone could reuse
"""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.pairs import arguments, measure, ratio, show, summary, write
from examples.smollm import FirstToken
from tiered_cache import HostTier, TieredCache, TierStack

ANSWER = 16
COMMON: dict[str, Any] = {"vocab_size": 32_000, "max_position_embeddings": 8192, "pad_token_id": 0, "eos_token_id": None}


def like_qwen3_next(scale: int) -> Any:
    """Return a model of 3 x linear attention and 1 x full attention, in turn, with experts."""
    return transformers.Qwen3NextConfig(
        **COMMON, hidden_size=96 * scale, intermediate_size=256 * scale, num_hidden_layers=12, num_attention_heads=scale,
        num_key_value_heads=max(1, scale // 4), head_dim=96, linear_num_value_heads=2 * scale, linear_num_key_heads=scale,
        linear_key_head_dim=64, linear_value_head_dim=64, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=64 * scale, shared_expert_intermediate_size=64 * scale,
    )  # fmt: skip


def like_lfm2(scale: int) -> Any:
    """Return a model of short convolutions and full attention, as LFM2-350M."""
    kinds = ["full_attention" if place in (2, 5, 8, 10, 12, 14) else "conv" for place in range(16)]
    return transformers.Lfm2Config(
        **COMMON, hidden_size=128 * scale, intermediate_size=384 * scale, num_hidden_layers=16, num_attention_heads=2 * scale,
        num_key_value_heads=scale, layer_types=kinds,
    )  # fmt: skip


class Chat:
    """One way of serving the turns of a chat, and what it took."""

    def __init__(self, model: Any, lengths: list[int]) -> None:
        self.model = model
        self.lengths = lengths
        self.seconds: dict[str, list[list[float]]] = {}
        self.computed: dict[str, list[int]] = {}
        self.snapshot_nbytes: list[int] = []

    def run(self, name: str, round_: int, make_cache: Any, stack: TierStack | None = None) -> float:
        """Play the chat once; return the sum of the turns' times to first token, seconds."""
        generator = torch.Generator().manual_seed(round_ + 10)
        ids = torch.empty(1, 0, dtype=torch.long)
        seconds, computed, nbytes = [], [], []
        for length in self.lengths:
            ids = torch.cat([ids, torch.randint(3, self.model.config.vocab_size, (1, length), generator=generator)], dim=1)
            cache, clock = make_cache(), FirstToken()
            held = cache.get_seq_length() if isinstance(cache, DynamicCache) and not isinstance(cache, TieredCache) else 0
            prompt = ids.shape[1]
            ids = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=ANSWER, min_new_tokens=ANSWER,
                do_sample=False, streamer=clock,
            )  # fmt: skip
            seconds.append(clock.seconds)
            computed.append(cache.usage.computed_tokens if isinstance(cache, TieredCache) else prompt - held)
            nbytes.append(stack.tiers[-1].snapshot_bytes if stack is not None else 0)
        if round_ >= 0:
            self.seconds.setdefault(name, []).append(seconds)
        self.computed[name] = computed
        if stack is not None:
            self.snapshot_nbytes = [after - before for before, after in zip([0, *nbytes], nbytes, strict=False)]
        return sum(seconds)


def main() -> None:
    options = arguments(__doc__, "hybrid.json")
    scale, lengths = (1, [40] * 3) if options.smoke else (8, [700, 120, 120, 120, 120, 120])
    results: dict[str, Any] = {"lengths": lengths, "answer": ANSWER}
    for name, config in (("like Qwen3-Next", like_qwen3_next(scale)), ("like LFM2", like_lfm2(scale))):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        chat = Chat(model, lengths)

        def ours(round_: int, chat: Chat = chat) -> float:
            with TierStack(HostTier("2GiB")) as stack:
                return chat.run("ours", round_, lambda: TieredCache(stack), stack)

        def scratch(round_: int, chat: Chat = chat) -> float:
            return chat.run("scratch", round_, lambda: DynamicCache(config=chat.model.config))

        def carried(round_: int, chat: Chat = chat) -> float:
            cache = DynamicCache(config=chat.model.config)
            return chat.run("carried", round_, lambda: cache)

        totals = measure({"ours": ours, "scratch": scratch, "carried": carried}, options.rounds)
        ratios = {"ours / carried": ratio(totals, "ours", "carried"), "scratch / ours": ratio(totals, "scratch", "ours")}
        by_turn = {
            way: [summary([turns[place] for turns in rounds])["median"] for place in range(len(lengths))]
            for way, rounds in chat.seconds.items()
        }
        print(f"{name}: {model.num_parameters() / 1e6:.0f} M parameters, {len(lengths)} turns")
        for way, computed in chat.computed.items():
            times = ", ".join(f"{seconds:.2f}" for seconds in by_turn[way])
            print(f"  {way}: {sum(computed):,} prompt tokens computed {computed}; first token after {times} s")
        print(f"  snapshots: {', '.join(f'{nbytes / 2**20:.2f}' for nbytes in chat.snapshot_nbytes)} MiB a turn")
        for what, value in ratios.items():
            print(f"  {what}: {show(value)}")
        results[name] = {
            "parameters": model.num_parameters(), "computed": chat.computed, "first token by turn": by_turn,
            "snapshot bytes by turn": chat.snapshot_nbytes, **ratios, "raw": chat.seconds,
        }  # fmt: skip
    write(options.output, results)


if __name__ == "__main__":
    main()
