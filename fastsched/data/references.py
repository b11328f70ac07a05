"""What the base policy reads of training rows: the question with its reference, to be embedded, and the answer, to be judged."""

import json
from dataclasses import dataclass
from typing import Optional

from fastsched.config import DataConfig, require
from fastsched.data.datasets import PromptSet
from fastsched.data.encode import conversation, render, tokenize


@dataclass(frozen=True)
class References:
    """Of B consecutive rows."""

    texts: list[str]  # "Question:" question "Answer:" reference (algorithms.md 2.1)
    text_ids: list[list[int]]
    prompt_ids: list[list[int]]  # the question as the only message: without system prompt, examples and prefill
    answer_ids: list[list[int]]  # empty where the row has no answer
    unreferenced: int  # rows whose reference column is empty; their answer stands for it


def references(prompts: PromptSet, start: int, stop: int, tokenizer, cfg: DataConfig, column: Optional[str]) -> References:
    """Of rows start..stop-1. `column` holds the reference chain of thought; ConfigError when the rows have no such column."""
    rows = prompts.rows[start:stop]
    questions, answers = rows["text"], rows["answer"]
    found = [_reference(meta, column) for meta in rows["meta"]] if column else [""] * len(questions)
    texts = [f"Question:{q}Answer:{reference or a}" for q, reference, a in zip(questions, found, answers, strict=True)]
    alone = [render(tokenizer, conversation(q, [], start + i), start + i) for i, q in enumerate(questions)] if cfg.chat else questions
    return References(texts, tokenize(tokenizer, texts, chat=False), tokenize(tokenizer, list(alone), cfg.chat),
                      tokenize(tokenizer, list(answers), chat=True), found.count("") if column else 0)


def _reference(meta: str, column: str) -> str:
    values = json.loads(meta)
    require(column in values, f"features.reference_column: the rows have no column {column!r}; they have {', '.join(values)}")
    return str(values[column] or "").strip()
