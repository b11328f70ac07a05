import pytest

from fastsched.config import ConfigError
from fastsched.data.encode import literal_frame, prefills

TRIMMING = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}<|assistant|>"
REPEATING = "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"
COUNTING = "{% for m in messages %}{{ m['content'] | length }}{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"


def continued_ids(tokenizer, messages):
    return tuple(tokenizer.apply_chat_template(messages, continue_final_message=True)["input_ids"])


def test_a_template_that_changes_texts_has_no_frame(make_tokenizer):
    assert literal_frame(make_tokenizer(), [], ["What is 1 + 2?"]) == ("<|user|>\n", "<|end|>\n<|assistant|>\n")
    assert literal_frame(make_tokenizer(TRIMMING), [], [" What is 1 + 2?"]) is None
    assert literal_frame(make_tokenizer(REPEATING), [], ["What is 1 + 2?"]) is None
    assert literal_frame(make_tokenizer(COUNTING), [], ["What is 1 + 2?"]) is None


def test_a_prefill_ends_the_frame(make_tokenizer):
    frame = literal_frame(make_tokenizer(), [], ["What is 1 + 2?", "What is 3 + 4?"], ["1 + 2 =", "3 + 4 ="])
    assert frame == ("<|user|>\n", "<|end|>\n<|assistant|>\n")
    assert literal_frame(make_tokenizer(COUNTING), [], ["What is 1 + 2?"], ["1 + 2 ="]) is None


@pytest.mark.parametrize("template", [None, COUNTING])
def test_arithmetic_prompts_end_in_the_prefill(load, make_tokenizer, template):
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    for prompts in load(tok=tokenizer, system_prompt="Add.", prefill="{problem} ="):
        for row in range(len(prompts)):
            prompt = prompts.prompt(row)
            assert prompt.token_ids == continued_ids(tokenizer, [
                {"role": "system", "content": "Add."}, {"role": "user", "content": prompt.text},
                {"role": "assistant", "content": prompt.text.removeprefix("What is ").rstrip("?") + " ="}])


def test_the_prefill_of_a_data_set_comes_from_its_columns(load, tokenizer, write_jsonl):
    rows = [{"prompt": f"{i} + 1?", "answer": str(i + 1), "hint": f"<{i}>"} for i in range(8)]
    train, _ = load(task="dataset", source=write_jsonl(rows), eval_per_bin=2, prefill="Hint {hint}: ")
    for row in range(len(train)):
        prompt = train.prompt(row)
        assert tokenizer.decode(prompt.token_ids).endswith(f"<|assistant|>\n{prompt.prefill}")
        assert prompt.prefill == f"Hint <{prompt.text.split()[0]}>: "


def test_a_row_that_ends_in_an_assistant_turn_is_continued(load, tokenizer, write_jsonl):
    turns = [{"role": "user", "content": "Prove it."}, {"role": "assistant", "content": "<think>"}]
    rows = [{"prompt": [{**turns[0], "content": str(i)}, turns[1]], "answer": "1"} for i in range(6)]
    train, _ = load(task="dataset", source=write_jsonl(rows), eval_per_bin=2)
    assert all(tokenizer.decode(train.prompt(row).token_ids).endswith("<|assistant|>\n<think>") for row in range(len(train)))
    assert all(train.prompt(row).prefill == "<think>" for row in range(len(train)))


def test_an_answer_that_begins_with_nothing(load):
    train, _ = load()
    assert train.prompt(0).prefill == ""


def test_two_beginnings_of_one_answer_are_an_error(load, write_jsonl):
    turns = [{"role": "user", "content": "Prove it."}, {"role": "assistant", "content": "<think>"}]
    with pytest.raises(ConfigError, match="data.prefill: row 0 ends in an assistant turn"):
        load(task="dataset", source=write_jsonl([{"prompt": turns, "answer": "1"}] * 6), prefill="Well,")


def test_a_column_that_is_not_there_is_named(load):
    with pytest.raises(ConfigError, match=r"data.prefill: there is no column 'problm' .* problem"):
        load(prefill="{problm} =")


def test_missing_values_are_the_row_s_problem(load, write_jsonl):
    assert prefills("{hint}!", {"hint": ["a", None]}, 2) == ["a!", None]
    rows = [{"prompt": f"{i} + 1?", "answer": "1", "hint": None if i == 3 else "h"} for i in range(8)]
    with pytest.raises(ConfigError, match=r"row 3 \(missing value for data.prefill\)"):
        load(task="dataset", source=write_jsonl(rows), eval_per_bin=2, prefill="{hint}")


def test_braces_that_are_no_placeholder_stay():
    assert prefills(r"\boxed{", {}, 1) == [r"\boxed{"]


def test_a_prefill_needs_a_chat(load):
    with pytest.raises(ConfigError, match="data.prefill: has no effect with data.chat false"):
        load(chat=False, prefill="{problem} =")
