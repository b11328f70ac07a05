"""Compiled ops that the package cannot use are refused with a reason; and the layout that Python, C++ and Triton share."""

import os
import subprocess
import sys

import pytest
import torch
import triton.language as tl
from fastsched_kernels import compiled_ops, table, triton_loss, triton_stats
from row_implementations import needs_compiled_ops

LOWER = """
import torch
from fastsched_kernels import compiled_ops, implementation
from fastsched_kernels.implementations import choose
from fastsched_kernels.linear import policy_loss
print(compiled_ops.load())
print(implementation())
x = torch.ones(2, 3, requires_grad=True)
policy_loss(x, torch.ones(5, 3), torch.zeros(2, dtype=torch.long), advantage=1.0, token_weight=1.0).loss.backward()
try:
    choose(torch.device("cpu"), torch.float32, "cpp")
except NotImplementedError as error:
    print(error)
"""


@needs_compiled_ops
def test_cpp_and_python_have_one_layout():
    assert compiled_ops.load() is None
    assert dict(torch.ops.fastsched_kernels.table_layout()) == table.layout()
    assert len(table.layout()) == 14 + 5 + 5 + 8 + 3 + 7


def test_triton_and_python_have_one_layout():
    """The prefix of a constant is its group; Partial is between Triton's own kernels."""
    constants = {name.lower().replace("_", ".", 1): value.value for module in (triton_loss, triton_stats)
                 for name, value in vars(module).items() if isinstance(value, tl.constexpr)}
    layout = table.layout()
    assert {name: constants.get(name) for name in layout} == layout
    sizes = {"columns": table.Column, "results": table.Result, "states": table.State, "coefficients": table.Coefficient}
    assert {name: constants[name] for name in sizes} == {name: len(members) for name, members in sizes.items()}
    assert {name: constants[f"partial.{name}"] for name in ("m", "s", "t", "u", "m_ref", "s_ref")} == {
        member.name.lower(): member.value for member in triton_stats.Partial}


def test_every_number_of_the_objective_has_its_column():
    numbers = {c.name.lower(): float(i) for i, c in enumerate(table.Column)}
    temperature = numbers.pop("temperature")
    fine = [torch.tensor([numbers.pop(name)]) for name in ("target_logit", "ref_target_logit")]
    made = table.objective_table(table.Objective(**numbers), 1, temperature, *fine, torch.device("cpu"))
    assert made.tolist() == [[float(i) for i in range(len(table.Column))]]


@needs_compiled_ops
def test_ops_of_another_layout_are_refused(monkeypatch):
    other = {**table.layout(), "column.distill": 11, "column.temperature": 10}
    monkeypatch.setattr(compiled_ops, "layout", lambda: other)
    assert compiled_ops.load.__wrapped__() == (
        "compiled ops are of another version (column.distill, column.temperature differ): install again")


@needs_compiled_ops
def test_a_processor_that_can_do_less_than_they_were_built_for_takes_pytorch_and_says_so():
    built = torch.ops.fastsched_kernels.capability()
    if built == "DEFAULT":
        pytest.skip("built for any processor")
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    out = subprocess.run([sys.executable, "-c", LOWER], env=environment, capture_output=True, text=True, check=True).stdout
    reason = f"compiled ops were built for {built}, this machine has DEFAULT: install again on this machine"
    assert out.splitlines() == [reason, f"pytorch ({reason})", f"implementation='cpp': {reason}"]
