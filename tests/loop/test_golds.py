"""Golds that do not accept themselves are found before a run."""

import json

import pytest

from fastsched.cli import main


@pytest.fixture
def dry_run(tmp_path, random_model, capsys):
    """Exit code and output of a dry run over rows with these answers."""

    def run(answers, *options):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"q": f"question {i}", "a": answer}) + "\n" for i, answer in enumerate(answers)))
        code = main(["train", "--dry-run", "--model.name", str(random_model), "--data.task", "dataset", "--data.source", str(file),
                     "--data.prompt_column", "q", "--data.answer_column", "a", "--data.eval_per_bin", "1", "--train.prompts_per_step", "2",
                     *options])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_rows_that_no_response_could_solve_are_listed(dry_run):
    code, said = dry_run(["12", "-3", "3 or 4", "none", "5"] * 4, "--reward.kind", "exact_number")
    assert code == 0 and "do not accept their own answer" in said
    assert "'3 or 4'" in said and "'none'" in said and "'12'" not in said


def test_a_column_that_holds_no_answers_is_refused(dry_run):
    code, said = dry_run(["a long story", "another one"] * 4, "--reward.kind", "exact_number")
    assert code == 2 and "reward.kind: exact_number accepts none of the answers" in said and "data.answer_column" in said


@pytest.mark.parametrize("bad, refused", [(4, False), (9, True)])
def test_most_answers_must_accept_themselves(dry_run, bad, refused):
    code, said = dry_run(["none"] * bad + ["12"] * (13 - bad), "--reward.kind", "exact_number")
    assert code == (2 if refused else 0)
    assert ("accepts only 3 of 12 of the answers" if refused else "4 of 12 rows that were tried do not accept their own answer") in said


def test_rows_are_those_of_the_file(dry_run):
    """Three rows before it are held out, so that its number in the training set is another."""
    code, said = dry_run([*"123456789", "none"], "--reward.kind", "exact_number", "--data.eval_per_bin", "3")
    assert code == 0 and "row 9: 'none'" in said


def test_every_one_of_several_rewards_is_asked(dry_run):
    code, said = dry_run(["12", "x^y", "7", "8", "9"] * 2, "--reward.kind", "math_verify", "--reward.extra", "[{kind: exact_number}]")
    assert code == 0 and "under reward.kind exact_number" in said and "under reward.kind math_verify" not in said and "'x^y'" in said


def test_mathematics_accepts_itself(dry_run):
    code, said = dry_run(["y = 2x + 1", "1, 2, 3", "\\frac{1}{2}", "x > 3"] * 2, "--reward.kind", "math_verify")
    assert code == 0 and "golds: those that were tried accept their own answer" in said


def test_a_users_function_is_not_asked_what_only_it_knows(dry_run, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def nothing(prompt, response, answer, meta):\n    return 0.0\n")
    monkeypatch.chdir(tmp_path)
    code, said = dry_run(["a story"] * 4, "--reward.kind", "mine:nothing")
    assert code == 0 and "do not accept" not in said
