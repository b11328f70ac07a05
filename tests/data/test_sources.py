import datasets
import pytest

from fastsched.config import ConfigError


def questions(n, **extra):
    return [{"prompt": f"What is {i} + 1?", "answer": str(i + 1), **extra} for i in range(n)]


def everything(prompts):
    return [prompts.prompt(row) for row in range(len(prompts))]


def test_rows_of_a_jsonl_file(load, write_jsonl):
    train, held = load(task="dataset", source=write_jsonl(questions(50, level=3)))
    assert (len(train), len(held)) == (46, 4)
    for prompt in everything(train):
        assert prompt.text == f"What is {int(prompt.answer) - 1} + 1?"
        assert prompt.meta == {"level": 3}


def test_rows_of_a_parquet_file_with_other_column_names(load, tmp_path):
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict({"q": [f"text {i}" for i in range(20)], "a": list(range(20))}).to_parquet(path)
    train, _ = load(task="dataset", source=str(path), prompt_column="q", answer_column="a")
    assert train.prompt(0).text == f"text {train.prompt(0).answer}"


def test_numbers_as_answers_become_plain_text(load, write_jsonl):
    rows = [{"prompt": str(answer), "answer": answer} for answer in (1, 2.5, 3, -4)]
    for part in load(task="dataset", source=write_jsonl(rows), eval_per_bin=1):
        assert all(prompt.answer == prompt.text for prompt in everything(part))


def test_the_split_is_the_one_asked_for(load, write_jsonl):
    source = write_jsonl(questions(50))
    train, held = load(task="dataset", source=source, split="train[:10]")
    assert len(train) + len(held) == 10
    with pytest.raises(ConfigError, match="data.split: 'test'"):
        load(task="dataset", source=source, split="test")


def test_the_subset_is_the_one_asked_for(load, tmp_path, write_jsonl):
    for name in ("one", "two"):
        write_jsonl([{**row, "name": name} for row in questions(8)], f"{name}.jsonl")
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("one", "two"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    train, _ = load(task="dataset", source=str(tmp_path), subset="two")
    assert train.prompt(0).meta == {"name": "two"}


@pytest.mark.parametrize("option", ["prompt_column", "answer_column", "difficulty_column"])
def test_a_missing_column_names_those_there_are(load, write_jsonl, option):
    with pytest.raises(ConfigError, match=f"data.{option}: .*no column 'question'; it has prompt, answer"):
        load(task="dataset", source=write_jsonl(questions(5)), **{option: "question"})


def test_a_missing_file(load):
    with pytest.raises(ConfigError, match="data.source: there is no file nowhere.jsonl"):
        load(task="dataset", source="nowhere.jsonl")


def test_a_broken_line_is_named(load, tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "x", "answer": "1"}\n\n{"prompt": "y", "answer" "1"}\n')
    with pytest.raises(ConfigError, match=r"broken.jsonl, line 3: Expecting ':' delimiter"):
        load(task="dataset", source=str(path))


def test_files_without_rows(load, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="empty.jsonl is empty"):
        load(task="dataset", source=str(tmp_path / "empty.jsonl"))
    (tmp_path / "odd.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match="odd.parquet cannot be read"):
        load(task="dataset", source=str(tmp_path / "odd.parquet"))


def test_a_changed_file_is_read_again(load, write_jsonl):
    first, _ = load(task="dataset", source=write_jsonl(questions(20)))
    second, _ = load(task="dataset", source=write_jsonl(questions(21)))
    assert (len(first), len(second)) == (16, 17)


def test_a_hub_that_cannot_be_reached_is_one_clear_message(load, monkeypatch):
    def unreachable(*args, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConfigError, match="data.source: 'owner/name' is no .jsonl, .parquet or .csv file.*no network"):
        load(task="dataset", source="owner/name")


def test_a_csv_file_arrives_as_it_is_written(load, tmp_path):
    """Readers that guess make 7 of 007, a date of 2024-01-05, a rounded float of a large integer and nothing of NA."""
    answers = ["007", "1.10", "2024-01-05", "9007199254740993", "NA", "true", "1e3", "None"]
    path = tmp_path / "rows.csv"
    path.write_text("question,answer,level\n" + "".join(f'"What, is {i}?",{a},{i % 3}\n' for i, a in enumerate(answers * 4)))
    train, held = load(task="dataset", source=str(path), prompt_column="question", difficulty_column="level", bins=3, eval_per_bin=1)
    found = {prompt.text: prompt.answer for part in (train, held) for prompt in everything(part)}
    assert all(found[f"What, is {i}?"] == a for i, a in enumerate(answers * 4)) and set(train.bins) == {0, 1, 2}


def test_a_difficulty_that_is_no_number_is_refused(load, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer,level\nq,1,easy\nr,2,3\n")
    with pytest.raises(ConfigError, match="data.difficulty_column: 'level' holds text that is no number"):
        load(task="dataset", source=str(path), difficulty_column="level", eval_per_bin=1)


def test_a_dot_leads_into_a_column(load, write_jsonl):
    rows = [{"prompt": f"text {i}", "reward_model": {"ground_truth": str(i), "style": "rule"}} for i in range(20)]
    train, _ = load(task="dataset", source=write_jsonl(rows), answer_column="reward_model.ground_truth")
    assert all(prompt.text == f"text {prompt.answer}" for prompt in everything(train))
    with pytest.raises(ConfigError, match="no column 'reward_model.truth'; it has prompt, reward_model.ground_truth, reward_model.style"):
        load(task="dataset", source=write_jsonl(rows), answer_column="reward_model.truth")


def test_a_pattern_is_all_files_that_match(load, write_jsonl, tmp_path):
    for k in range(3):
        write_jsonl(questions(50)[10 * k:10 * k + 10], f"part-{k}.jsonl")
    source = str(tmp_path / "part-*.jsonl")
    train, held = load(task="dataset", source=source)
    assert sorted(int(p.answer) for part in (train, held) for p in everything(part)) == list(range(1, 31))
    write_jsonl(questions(50)[40:50], "part-1.jsonl")  # the content decides, not the name
    train, held = load(task="dataset", source=source)
    assert 45 in {int(p.answer) for part in (train, held) for p in everything(part)}
    with pytest.raises(ConfigError, match="data.source: no file matches .*none-"):
        load(task="dataset", source=str(tmp_path / "none-*.jsonl"))


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_bytes_that_are_no_text_name_file_and_line(load, tmp_path, name):
    path, good = tmp_path / name, b'{"prompt": "q", "answer": "1"}' if name.endswith("jsonl") else b"q,1"
    path.write_bytes(b"\n".join([good if name.endswith("jsonl") else b"prompt,answer", good, good.replace(b"q", b"\xff\xfe"), good]))
    with pytest.raises(ConfigError, match=f"{name}, line 3: .*codec can't decode"):
        load(task="dataset", source=str(path), eval_per_bin=1)
