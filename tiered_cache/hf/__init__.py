"""The only folder that meets transformers. Importing it installs the hooks."""

from tiered_cache.hf import generation

generation.install()
