import pytest

from fastsched.config import ConfigError
from fastsched.data.references import references

ROWS = [{"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"What is {i} + 1?"}], "answer": str(i + 1),
         "solution": None if i % 5 == 0 else f"{i} and 1 are {i + 1}."} for i in range(20)]


@pytest.fixture
def train(load, write_jsonl):
    return load(task="dataset", source=write_jsonl(ROWS), eval_per_bin=2)[0]


def cfg(**changes):
    from fastsched.config import DataConfig

    return DataConfig(**{"task": "dataset", "source": "x", **changes})


def test_the_question_goes_with_its_reference_or_its_answer(train, tokenizer):
    got = references(train, 3, 15, tokenizer, cfg(), "solution")
    empty = 0
    for row, text in zip(range(3, 15), got.texts, strict=True):
        source = ROWS[train.rows[row]["source_row"]]
        empty += source["solution"] is None
        assert text == f"Question:{source['prompt'][1]['content']}Answer:{source['solution'] or source['answer']}"
    assert got.unreferenced == empty > 0
    assert got.text_ids[0] == tokenizer(got.texts[0]).input_ids
    answers = references(train, 3, 15, tokenizer, cfg(), None)
    assert answers.unreferenced == 0 and answers.texts[0].endswith(f"Answer:{train.prompt(3).answer}")


def test_the_judged_prompt_has_neither_system_prompt_nor_examples(train, tokenizer):
    decorated = cfg(examples=(("What is 9 + 9?", "18"),), prefill="Sure: ")
    got = references(train, 0, 4, tokenizer, decorated, None)
    for row in range(4):
        prompt = train.prompt(row)
        assert tokenizer.decode(got.prompt_ids[row]) == f"<|user|>\n{prompt.text}<|end|>\n<|assistant|>\n"
        assert tokenizer.decode(got.answer_ids[row]) == prompt.answer


def test_plain_text_is_judged_as_it_is(load, write_jsonl, tokenizer):
    rows = [{"prompt": f"{i} + 1 = ", "answer": str(i + 1)} for i in range(10)]
    train = load(task="dataset", source=write_jsonl(rows), eval_per_bin=1, chat=False)[0]
    got = references(train, 0, 2, tokenizer, cfg(chat=False), None)
    assert got.prompt_ids == [list(train.prompt(row).token_ids) for row in range(2)]


def test_a_missing_column_is_named(train, tokenizer):
    with pytest.raises(ConfigError, match="features.reference_column: the rows have no column 'cot'; they have solution"):
        references(train, 0, 4, tokenizer, cfg(), "cot")
