"""minillm: an engine that serves language models, built chapter by chapter in the book of the same name."""

from minillm.config import ModelConfig

__all__ = ["ModelConfig"]
