import dataclasses
import json
import threading
from pathlib import Path

import numpy as np
import pytest

import fastsched.data.datasets as prompt_sets
from fastsched.config import ConfigError, DataConfig
from fastsched.data.datasets import load_prompts, require_batch

TRIMMING = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}<|assistant|>"
REPEATING = "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"
COUNTING = "{% for m in messages %}{{ m['content'] | length }}{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"
REFUSING = "{{ raise_exception('only one turn') if messages | length > 1 }}{{ messages[0]['content'] }}"


def chat_ids(tokenizer, messages):
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def questions(n, **extra):
    return [{"prompt": f"What is {i} + 1?", "answer": str(i + 1), **extra} for i in range(n)]


def everything(prompts):
    return [prompts.prompt(row) for row in range(len(prompts))]


@pytest.mark.parametrize("system", [None, "Answer with only the number."])
@pytest.mark.parametrize("template", [None, TRIMMING, REPEATING, COUNTING])
def test_arithmetic_tokens_are_those_of_the_chat_template(load, make_tokenizer, template, system):
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    for prompts in load(tok=tokenizer, system_prompt=system):
        for row, prompt in enumerate(everything(prompts)):
            messages = [{"role": "system", "content": system}] if system else []
            assert prompt.token_ids == chat_ids(tokenizer, [*messages, {"role": "user", "content": prompt.text}])
            assert prompt.row == row
            assert prompt.bin == prompts.bins[row] == prompt.meta["digits"] - 1


def test_without_chat_the_text_is_fed_as_the_tokenizer_encodes_it(load, tokenizer):
    train, _ = load(chat=False)
    for prompt in everything(train)[:20]:
        assert prompt.token_ids == tuple(tokenizer(prompt.text)["input_ids"])
        assert prompt.token_ids[0] == tokenizer.bos_token_id


def test_padding_that_someone_left_in_the_tokenizer_has_no_effect(load, tokenizer):
    expected = everything(load()[0])
    tokenizer(["one", "three words here"], padding="max_length", truncation=True, max_length=5)
    assert everything(load(seed=1)[0])[0].token_ids != expected[0].token_ids
    assert all(len(prompt.token_ids) > 5 for prompt in everything(load(seed=2)[0]))
    assert load()[0].digest == load(seed=0)[0].digest


def test_a_second_load_comes_from_the_cache(load, monkeypatch):
    first = load()
    monkeypatch.setattr(prompt_sets, "build_sets", None)
    again = load()
    assert [p.digest for p in again] == [p.digest for p in first]
    assert everything(again[0]) == everything(first[0])


def test_prompts_are_memory_mapped(load, tmp_path):
    for prompts in load():
        assert Path(prompts.rows.cache_files[0]["filename"]).is_relative_to(tmp_path / "cache")


def test_the_cache_folder_comes_from_the_environment(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTSCHED_CACHE", str(tmp_path / "elsewhere"))
    load_prompts(DataConfig(size=8), tokenizer, 0)
    assert list((tmp_path / "elsewhere" / "prompts").iterdir())


@pytest.mark.parametrize("change", [
    {"seed": 1}, {"size": 201}, {"digits": (1, 2)}, {"operators": "+"}, {"system_prompt": "Be brief."}, {"chat": False},
    {"examples": (("1 + 1?", "2"),)}, {"negative": False}, {"operator_weights": (3.0, 1.0)}, {"prefill": "{problem} ="},
    {"task": "reasoning-gym:chain_sum"},
])
def test_every_option_of_generated_data_changes_the_digest(load, change):
    assert load()[0].digest != load(**change)[0].digest


def test_the_template_of_the_tokenizer_counts(load, make_tokenizer):
    assert load()[0].digest != load(tok=make_tokenizer(TRIMMING))[0].digest


def test_held_out_arithmetic_does_not_depend_on_the_seed(load):
    (first, held), (other, held_again) = load(seed=1), load(seed=2)
    assert held.digest == held_again.digest
    assert first.digest != other.digest
    assert held.report["held_out_per_bin"] == [4, 4, 4, 4]
    assert first.report["train_per_bin"] == [50, 50, 50, 50]


def test_several_processes_may_load_at_once(load):
    digests = []
    threads = [threading.Thread(target=lambda: digests.append(load()[0].digest)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(digests) == 3
    assert len(set(digests)) == 1


def test_a_failed_build_leaves_nothing_behind(load, tmp_path):
    with pytest.raises(ConfigError):
        load(max_prompt_tokens=1)
    assert [p.suffix for p in (tmp_path / "cache" / "prompts").iterdir()] == [".lock"]


def test_chat_messages_go_through_the_template_as_they_are(load, tokenizer, write_jsonl):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"},
             {"role": "assistant", "content": "2"}, {"role": "user", "content": "2 + 2?", "name": "Ann"}]
    short = [{"role": "user", "content": "3 + 3?"}]
    source = write_jsonl([{"prompt": turns, "answer": "4"}, {"prompt": short, "answer": "6"}] * 5)
    train, held = load(task="dataset", source=source, eval_per_bin=1, max_prompt_tokens=500)
    seen = {prompt.text: prompt for prompt in everything(train) + everything(held)}
    assert seen["2 + 2?"].token_ids == chat_ids(tokenizer, turns)
    assert seen["3 + 3?"].token_ids == chat_ids(tokenizer, short)


def test_two_rows_with_one_text_stay_two_prompts(load, write_jsonl):
    rows = [{"prompt": "same", "answer": "1"}, {"prompt": "same", "answer": "2"}, *questions(9)]
    train, held = load(task="dataset", source=write_jsonl(rows), eval_per_bin=1)
    assert held.prompt(0).text != "same"
    pair = [prompt for prompt in everything(train) if prompt.text == "same"]
    assert [prompt.answer for prompt in pair] == ["1", "2"]
    assert pair[0].row != pair[1].row


def test_an_overlong_prompt_is_an_error_with_its_row(load, write_jsonl):
    rows = questions(30)
    rows[17]["prompt"] = "word " * 10_000
    source = write_jsonl(rows)
    with pytest.raises(ConfigError, match=r"data.max_prompt_tokens: 1 of 30 .* row 17 \(\d{5} tokens\).*overlong drop"):
        load(task="dataset", source=source)
    train, held = load(task="dataset", source=source, overlong="drop")
    assert len(train) + len(held) == 29
    assert train.report["dropped"] == {"longer than 256 tokens": {"count": 1, "rows": [17]}}
    assert 17 not in train.rows["source_row"][:] + held.rows["source_row"][:]
    assert [prompt.row for prompt in everything(train)] == list(range(len(train)))


def test_the_token_limit_is_inclusive(load, write_jsonl):
    source = write_jsonl(questions(10))
    longest = max(len(p.token_ids) for part in load(task="dataset", source=source) for p in everything(part))
    load(task="dataset", source=source, max_prompt_tokens=longest)
    with pytest.raises(ConfigError, match="data.max_prompt_tokens"):
        load(task="dataset", source=source, max_prompt_tokens=longest - 1)


def test_unusable_rows_are_an_error_or_dropped_and_counted(load, write_jsonl):
    rows = questions(30)
    rows[3]["prompt"] = " \n"
    rows[4]["prompt"] = None
    rows[9]["answer"] = None
    del rows[12]["answer"]
    source = write_jsonl(rows)
    expected = r"4 of 30 rows .*: row 3 \(empty prompt\), row 4 \(empty prompt\), row 9 \(missing answer\), row 12"
    with pytest.raises(ConfigError, match=expected):
        load(task="dataset", source=source)
    train, held = load(task="dataset", source=source, invalid="drop")
    assert len(train) + len(held) == 26
    assert train.report["dropped"] == {"empty prompt": {"count": 2, "rows": [3, 4]},
                                       "missing answer": {"count": 2, "rows": [9, 12]}}


def test_only_the_first_row_numbers_are_listed(load, write_jsonl):
    with pytest.raises(ConfigError, match=r"7 of 7 rows .* row 4 \(missing answer\) and so on"):
        load(task="dataset", source=write_jsonl([{"prompt": "x", "answer": ""}] * 7))


@pytest.mark.parametrize("prompt", [[], [{"role": "user", "content": ""}]])
def test_empty_messages_are_empty_prompts(load, write_jsonl, prompt):
    good = {"prompt": [{"role": "user", "content": "x"}], "answer": "1"}
    with pytest.raises(ConfigError, match=r"row 1 \(empty prompt\)"):
        load(task="dataset", source=write_jsonl([good, {"prompt": prompt, "answer": "1"}]))


def test_dropping_everything_is_an_error(load, write_jsonl):
    with pytest.raises(ConfigError, match="every one of the 5 rows was dropped"):
        load(task="dataset", source=write_jsonl(questions(5)), max_prompt_tokens=1, overlong="drop")


def test_held_out_rows_are_fixed_and_never_trained_on(load, write_jsonl):
    source = write_jsonl(questions(60) + questions(60))
    (train, held), (_, again) = (load(task="dataset", source=source, seed=seed, eval_per_bin=10) for seed in (0, 1))
    assert held.digest == again.digest
    assert len(held) == 10
    assert {p.text for p in everything(held)}.isdisjoint(p.text for p in everything(train))
    dropped = train.report["dropped"]["same prompt as a held-out row"]
    assert dropped["count"] == len(dropped["rows"]) == 110 - len(train)
    assert held.rows["source_row"][:] != list(range(10))


def test_a_held_out_part_that_leaves_nothing_to_train_on(load, write_jsonl):
    with pytest.raises(ConfigError, match="data.eval_per_bin: 5 held-out rows leave none of bin 0"):
        load(task="dataset", source=write_jsonl(questions(5)), eval_per_bin=5)


def test_difficulty_bins(load, write_jsonl):
    rows = [{**row, "hard": i * 0.5} for i, row in enumerate(questions(90))]
    options = {"task": "dataset", "source": write_jsonl(rows), "difficulty_column": "hard"}
    train, held = load(bins=3, **options)
    assert train.report["train_per_bin"] == [26, 26, 26]
    assert held.report["held_out_per_bin"] == np.bincount(held.bins).tolist() == [4, 4, 4]
    assert all(prompt.bin == prompt.meta["hard"] // 15 for prompt in everything(train))
    assert load(bins=2, **options)[0].report["train_per_bin"] == [41, 41]
    assert load(task="dataset", source=options["source"])[0].report["train_per_bin"] == [86]


def test_a_constant_difficulty_says_that_one_bin_is_used(load, write_jsonl):
    train, _ = load(task="dataset", source=write_jsonl(questions(20, hard=1)), difficulty_column="hard")
    assert train.report["train_per_bin"] == [16]
    assert "1 used" in train.report["bins"]


def test_a_difficulty_that_is_no_number_is_named(load, write_jsonl):
    rows = questions(20, hard=1.5)
    rows[6]["hard"] = None
    with pytest.raises(ConfigError, match=r"row 6 \(difficulty is None, not a finite number\)"):
        load(task="dataset", source=write_jsonl(rows), difficulty_column="hard")


def test_settings_that_contradict_the_data(load, make_tokenizer, write_jsonl):
    with pytest.raises(ConfigError, match="data.chat: the tokenizer has no chat template"):
        load(tok=make_tokenizer(template=""))
    with pytest.raises(ConfigError, match="data.system_prompt: has no effect"):
        load(chat=False, system_prompt="Be brief.")
    turns = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    own = write_jsonl([{"prompt": turns, "answer": "1"}])
    with pytest.raises(ConfigError, match="row 0 has a system message of its own"):
        load(task="dataset", source=own, system_prompt="Be brief.")
    with pytest.raises(ConfigError, match="data.chat: row 0 is a list of chat messages"):
        load(task="dataset", source=own, chat=False)
    with pytest.raises(ConfigError, match="template rejects the messages of row 0: only one turn"):
        load(task="dataset", source=own, tok=make_tokenizer(REFUSING))


def test_reasoning_gym_prompts_carry_their_entry(load):
    train, held = load(task="reasoning-gym:chain_sum", size=50)
    assert (len(held), train.report["train_per_bin"]) == (4, [len(train)])
    assert train.prompt(0).meta["task"] == "chain_sum"
    assert {p.text for p in everything(held)}.isdisjoint(p.text for p in everything(train))


def test_a_data_set_smaller_than_a_batch(load):
    train, _ = load(size=15)
    require_batch(train, 15)
    with pytest.raises(ConfigError, match="train.prompts_per_step: 16 prompts a step.* has 15 to train on"):
        require_batch(train, 16)


def test_rows_outside_are_refused(load):
    train, _ = load()
    for row in (-1, len(train)):
        with pytest.raises(IndexError, match=f"row {row} of a prompt set of 200"):
            train.prompt(row)


def test_prompts_are_plain_values(load):
    prompt = load()[0].prompt(np.int64(3))
    assert json.dumps(dataclasses.asdict(prompt))
    assert isinstance(prompt.token_ids, tuple)
