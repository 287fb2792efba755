"""minillm: an engine that serves language models, built chapter by chapter in the book of the same name."""

from minillm.config import EngineConfig, ModelConfig
from minillm.llm import LLM
from minillm.sampling import SamplingParams
from minillm.tokenizer import load_tokenizer
from minillm.weights import load_model

__all__ = ["LLM", "EngineConfig", "ModelConfig", "SamplingParams", "load_model", "load_tokenizer"]
