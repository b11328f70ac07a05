"""Dataset rows to prompt token ids, through the tokenizer's own chat template, with what is wrong with each row."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Optional, Sequence

import jinja2

from fastsched.config import ConfigError, DataConfig, require

SENTINEL = "\ue000fastsched\ue001"
PREFILL_SENTINEL = "\ue000prefill\ue001"
PLACEHOLDER = re.compile(r"\{(\w+)\}")
PROBES = 64  # rows on which the frame of a template is checked against full rendering

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Columns:
    """Where a source keeps what is needed. `meta` is a column of JSON texts, without it all other columns are meta."""

    prompt: str
    answer: str
    difficulty: Optional[str] = None
    meta: Optional[str] = None
    answer_optional: bool = False


def check_tokenizer(cfg: DataConfig, tokenizer) -> None:
    require(not cfg.chat or bool(tokenizer.chat_template),
            "data.chat: the tokenizer has no chat template; set data.chat false to feed the text as it is")
    for key, value in (("system_prompt", cfg.system_prompt), ("examples", cfg.examples), ("prefill", cfg.prefill)):
        require(cfg.chat or not value, f"data.{key}: has no effect with data.chat false; put it into the prompts or unset it")


def shown(prompt: Any) -> str:
    """A prompt as sample tables show it: the text, or of messages the last one's content."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1]["content"]
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def beginning(prompt: Any, prefill: Optional[str]) -> str:
    """What the policy's answer begins with: `data.prefill` of the row, or the assistant turn that its messages end in."""
    if prefill is not None:
        return prefill
    return shown(prompt) if isinstance(prompt, list) and prompt[-1]["role"] == "assistant" else ""


def prompt_problem(prompt: Any) -> str:
    if prompt is None or prompt == [] or isinstance(prompt, str) and not prompt.strip():
        return "empty prompt"
    if isinstance(prompt, str):
        return ""
    if not isinstance(prompt, list) or not all(isinstance(m, dict) and m.get("role") for m in prompt):
        return "prompt is neither text nor a list of messages with role and content"
    return "" if prompt[-1].get("content") and shown(prompt).strip() else "empty prompt"


def answer_problem(answer: Any) -> str:
    if answer is None or isinstance(answer, float) and math.isnan(answer) or str(answer).strip() == "":
        return "missing answer"
    return "" if isinstance(answer, (str, int, float)) else f"answer is a {type(answer).__name__}, not text or a number"


def answer_text(answer: Any) -> str:
    """The answer as text; whole numbers without the ".0" that Arrow adds where other rows have fractions."""
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return "" if answer is None else str(answer)


def difficulty_problem(value: Any) -> str:
    number = isinstance(value, (int, float)) and math.isfinite(value)
    return "" if number else f"difficulty is {value!r}, not a finite number"


def opening(cfg: DataConfig) -> Messages:
    """What every conversation starts with: the system prompt, then the examples as finished turns."""
    system = [] if cfg.system_prompt is None else [{"role": "system", "content": cfg.system_prompt}]
    turns = [(("user", question), ("assistant", answer)) for question, answer in cfg.examples]
    return system + [{"role": role, "content": content} for turn in turns for role, content in turn]


def conversation(prompt: Any, start: Messages, row: int, prefill: Optional[str] = None) -> Messages:
    """`start`, the chat messages of one prompt and the beginning of the answer.

    Keys of a message that Arrow filled with None because other rows have them are left out.
    """
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    require(not start or messages[0]["role"] != "system",
            f"data.system_prompt, data.examples: row {row} has a system message of its own; keep one of the two")
    if prefill is None:
        return [*start, *messages]
    require(messages[-1]["role"] != "assistant", f"data.prefill: row {row} ends in an assistant turn of its own; keep one of the two")
    return [*start, *messages, {"role": "assistant", "content": prefill}]


def render(tokenizer, messages: Messages, row: int) -> str:
    """The chat as text, open for the policy: after a generation prompt, or inside the assistant turn that `messages` end in."""
    try:
        continued = messages[-1]["role"] == "assistant"
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not continued,
                                             continue_final_message=continued)
    except (jinja2.TemplateError, ValueError) as error:
        raise ConfigError(f"data: the tokenizer's chat template rejects the messages of row {row}: {error}") from error


def literal_frame(tokenizer, start: Messages, texts: Sequence[str],
                  prefills: Optional[Sequence[str]] = None) -> Optional[tuple[str, str]]:
    """(before, after) such that before + text + after + prefill is the rendered prompt, checked on probes spread over `texts`.

    None where the template does more with the text than insert it once. For generated texts of one form, which the
    probes stand for; other sources are rendered row by row.
    """
    end = "" if prefills is None else PREFILL_SENTINEL
    rendered = render(tokenizer, conversation(SENTINEL, start, 0, end or None), 0)
    if rendered.count(SENTINEL) != 1 or not rendered.endswith(end):
        return None
    before, after = rendered.removesuffix(end).split(SENTINEL)
    for row in range(0, len(texts), max(1, len(texts) // PROBES)):
        prefill = None if prefills is None else prefills[row]
        if render(tokenizer, conversation(texts[row], start, row, prefill), row) != before + texts[row] + after + (prefill or ""):
            return None
    return before, after


def prefills(template: Optional[str], batch: dict[str, list], count: int) -> list[Optional[str]]:
    """`data.prefill` of `count` rows, its `{column}` replaced by the row's value; None where that value is missing."""
    if template is None:
        return [None] * count
    names = PLACEHOLDER.findall(template)
    for name in names:
        require(name in batch, f"data.prefill: there is no column {name!r} for {{{name}}}; the rows have {', '.join(batch)}")
    missing = [any(batch[name][i] is None for name in names) for i in range(count)]
    return [None if missing[i] else PLACEHOLDER.sub(lambda m, i=i: str(batch[m[1]][i]), template) for i in range(count)]


def tokenize(tokenizer, texts: list[str], chat: bool) -> list[list[int]]:
    """Token ids of rendered chats, whose template sets the special tokens, or of plain texts, which get them here."""
    fast = tokenizer.backend_tokenizer  # half the time of tokenizer(texts)
    fast.no_truncation()
    fast.no_padding()
    return [encoding.ids for encoding in fast.encode_batch_fast(texts, add_special_tokens=not chat)]


@dataclass(frozen=True)
class Encoder:
    """Maps column lists of a batch of source rows, the first of which is row `start`, to columns of a prompt set.

    Columns out: token_ids, text, answer, difficulty (float), meta (JSON), prefill, source_row, key (hash of the token ids)
    and problem, which is "" or why the row cannot be used; such rows have no token ids.
    """

    tokenizer: Any
    cfg: DataConfig
    columns: Columns
    frame: Optional[tuple[str, str]] = None

    def __call__(self, batch: dict[str, list], start: int) -> dict[str, list]:
        prompts, answers = batch[self.columns.prompt], batch[self.columns.answer]
        count = len(prompts)
        rows = list(range(start, start + count))
        difficulties = batch[self.columns.difficulty] if self.columns.difficulty else [0.0] * count
        starts = prefills(self.cfg.prefill, batch, count)
        problems = [self._problem(*values) for values in zip(prompts, answers, difficulties, starts, strict=True)]
        good = [i for i in range(count) if not problems[i]]
        token_ids: list[list[int]] = [[] for _ in rows]
        if good:
            texts = [self._rendered(prompts[i], starts[i], rows[i]) for i in good]
            for i, ids in zip(good, tokenize(self.tokenizer, texts, self.cfg.chat), strict=True):
                token_ids[i] = ids
        return {
            "token_ids": token_ids,
            "text": ["" if problem else shown(prompt) for prompt, problem in zip(prompts, problems, strict=True)],
            "answer": [answer_text(answer) for answer in answers],
            "difficulty": [0.0 if problem else float(d) for d, problem in zip(difficulties, problems, strict=True)],
            "meta": batch[self.columns.meta] if self.columns.meta else self._other_columns(batch, count),
            "prefill": ["" if problem else beginning(*values) for *values, problem in zip(prompts, starts, problems, strict=True)],
            "source_row": rows,
            "key": [hash(tuple(ids)) for ids in token_ids],
            "problem": problems,
        }

    def _problem(self, prompt: Any, answer: Any, difficulty: Any, prefill: Optional[str]) -> str:
        missing = "" if self.columns.answer_optional else answer_problem(answer)
        unfilled = "missing value for data.prefill" if self.cfg.prefill is not None and prefill is None else ""
        return prompt_problem(prompt) or missing or difficulty_problem(difficulty) or unfilled

    def _rendered(self, prompt: Any, prefill: Optional[str], row: int) -> str:
        if not self.cfg.chat:
            require(isinstance(prompt, str), f"data.chat: row {row} is a list of chat messages; set data.chat true")
            return prompt
        if self.frame is not None:
            return self.frame[0] + prompt + self.frame[1] + (prefill or "")
        return render(self.tokenizer, conversation(prompt, opening(self.cfg), row, prefill), row)

    def _other_columns(self, batch: dict[str, list], count: int) -> list[str]:
        names = [name for name in batch if name not in (self.columns.prompt, self.columns.answer)]
        return [json.dumps({name: batch[name][i] for name in names}, default=str) for i in range(count)]
