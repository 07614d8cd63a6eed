"""What all tests share. Tests need no network and no hub."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from typing import Any

import pytest


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Return a tokenizer of words w0 .. w127."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{number}": number for number in range(128)}, unk_token="w3"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w3")
