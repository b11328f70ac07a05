"""bench.learning.confident on the tiny policy: every way is measured on the same tokens."""

import re
import sys

import torch

from bench.learning import confident


def test_the_table_has_every_way(monkeypatch, capsys):
    few = ["--preset", "tiny-cpu", "--engine", "transformers", "--prompts", "4", "--responses", "2"]
    monkeypatch.setattr(sys, "argv", ["confident", *few])
    confident.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    found = {cells[1].strip(): cells[2:] for cells in (line.split("|") for line in lines)}
    assert tuple(found)[1:] == confident.WAYS
    assert float(found["fp32 logits"][0]) < 1e-4 < float(found["rounded logits"][0])
    assert all(re.fullmatch(r"\d\.\d{4}", cell.strip()) for way in confident.WAYS for cell in found[way][3:5])


def test_the_ways_differ_where_they_should():
    """A target of probability near one: its own rounding stays where the fine logit stands outside the sum, and nowhere else."""
    weight = torch.zeros(3, 4)
    weight[0, 0], weight[1, 1] = 1.0, 1.0
    hidden = torch.tensor([[25.05, 0.5, 0.0, 0.0]]).bfloat16()
    hidden, weight = torch.cat([hidden, hidden]), weight.bfloat16()
    weight[0, 3] = 1.0
    hidden[:, 3] = 0.03  # the sum of both is no bf16
    truth, ways = confident.head_ways(hidden, torch.tensor([0, 0]), weight)
    error = {way: float((found - truth).abs().max()) for way, found in ways.items()}
    assert error["fine target outside the sum"] > 0.01 > 1e-4 > max(error[way] for way in confident.WAYS[1:])
