import json

import pandas as pd
import pytest
from synthetic_run import write_run

from fastsched.cli import main
from fastsched.config import ModelConfig
from fastsched.engines.models.loading import load_tokenizer
from fastsched.learn.positions import TokenPositions, count_positions
from fastsched.report.tp_score import read_token_scores


def run_folder(path, model, responses):
    """What a run leaves that the token scores need: configuration and the state of two checkpoints, the newest with the counts."""
    for step, counted in ((1, []), (2, responses)):
        positions = TokenPositions()
        positions.add([count_positions(counted)])
        folder = path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        state = {"version": 2, "learner": {"skipped_in_row": 0, "positions": positions.state_dict()}}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "COMPLETE").touch()
    (path / "config.yaml").write_text(json.dumps({"model": {"name": str(model)}}))
    return path


def test_scores_come_from_the_newest_checkpoint_with_their_text(tmp_path, random_model):
    tokenizer = load_tokenizer(random_model, ModelConfig())
    first, middle, end = (tokenizer(c, add_special_tokens=False).input_ids[0] for c in ("7", "5", "3"))
    run = run_folder(tmp_path / "run", random_model, [[first, middle, end]] * 25 + [[end, first]])
    scores = read_token_scores(run)
    assert scores.table["token"].tolist() == [first, middle, end] and scores.table["seen"].tolist() == [26, 25, 26]
    assert scores.table["text"].tolist() == ["7", "5", "3"] and scores.table["tp_score"].is_monotonic_increasing
    early, mid, late = scores.groups.values()
    assert mid[50] == 1.0 and early[0] == pytest.approx(25 / 26) and late[99] == pytest.approx(25 / 26)


def test_report_writes_them_or_names_what_is_missing(capsys, tmp_path, random_model):
    run = write_run(tmp_path / "run", steps=2, total=2)
    assert main(["report", str(run), "--tp-score"]) == 2
    assert "holds no complete checkpoint" in capsys.readouterr().err
    run_folder(run, random_model, [[9, 8]] * 3)
    assert main(["report", str(run), "--tp-score"]) == 2
    assert "no token was counted 20 times by step-2" in capsys.readouterr().err
    assert main(["report", str(run), str(run), "--tp-score"]) == 2
    assert "--tp-score is of one run" in capsys.readouterr().err
    other = run_folder(write_run(tmp_path / "other", steps=2, total=2), random_model, [[9, 8]] * 20)
    assert main(["report", str(other), "--tp-score"]) == 0
    assert pd.read_csv(other / "tp_score.csv")["token"].tolist() == [9, 8] and (other / "plots" / "tp_score.png").exists()
